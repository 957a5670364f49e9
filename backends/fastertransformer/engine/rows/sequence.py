"""A submitted request and its sequences, one for each row."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Several
from copy import copy
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property

from torch import Tensor

from ..arrays import Array
from ..cache.page_allocator import PageAllocator
from ..grammar.guided_row import Grammar
from ..request.parse import Request
from .answer import Answer, Outline
from .beam import Beam
from .drafting import Drafting
from .reservation import Reservation
from .transcript import SessionRow, Transcript


@dataclass
class RowTimes:
    """Times by the clock of EngineMetrics; None: it has not happened.

    Attributes:
        begun_s: the row joined the batch for the first time.
        first_s: the host had its first token, or what it has instead of tokens.
        last_s: the host had its last token so far.
        steps: of which the tokens were counted. A step that is repeated after a failure is not counted twice.
    """

    begun_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    steps: int = -1


AT_ONCE = float("-inf")  # due before all others
_PART = re.compile(r"(.+)-[0-9]+", re.DOTALL)  # the name of one of several answers


@dataclass(eq=False)
class Job:
    """A request that has been submitted.

    Attributes:
        request: its parsed tensors.
        answer: is called with each answer.
        is_streaming: whether it is answered after every token.
        is_cancelled: returns whether the client has cancelled or disconnected.
        is_behind: returns whether its answers wait to be sent, so that one more is of no use yet; None: they never do.
        session: key of its session; None: none.
        wants_tokens_alone: whether its answers have the generated tokens and nothing more.
        sequences: one for each row, once the scheduler has it.
        has_begun: whether a sequence has been in the batch.
        grammars: of each row; None: it has none. Empty: no row has one.
        arrived_s: when it joined the queue; None: it has not.
        name: the client's name of it; empty: it has none.
        submitted_s: when it was submitted, or had arrived before that, of time.monotonic.
        outline: of its answers; None: it has none yet.
    """

    request: Request
    answer: Callable[[Answer], None]
    is_streaming: bool = False
    is_cancelled: Callable[[], bool] | None = None
    is_behind: Callable[[], bool] | None = None
    session: int | str | None = None
    wants_tokens_alone: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    has_begun: bool = False
    grammars: tuple[Grammar | None, ...] = ()
    arrived_s: float | None = None
    name: str = ""
    submitted_s: float = field(default_factory=time.monotonic)
    outline: Outline | None = None

    @cached_property
    def client(self) -> Hashable:
        """What it has in common with the other requests that stand for one request of a client.

        The endpoint asks for the answers of one request side by side, by names that differ in a number at their end.
        Those of a session are one after another.
        """
        if self.session is not None:
            return "session", self.session
        part = _PART.fullmatch(self.name)
        return part[1] if part else object()

    @property
    def is_done(self) -> bool:
        """Whether no sequence is still generated."""
        return all(sequence.is_done for sequence in self.sequences)

    @cached_property
    def context_tokens(self) -> int:
        """Tokens of its contexts, or of its encoder inputs."""
        return sum(each.tokens_to_run(0) for each in self.sequences)

    @property
    def has_news(self) -> bool:
        """Whether every restarted row is past the tokens that may have been answered before its restart."""
        return all(not each.is_isolated or each.is_done for each in self.sequences)


class State(Enum):
    """How far a sequence is."""

    WAITING = auto()  # in the queue, without pages
    PREFILLING = auto()  # has pages; its context, or some chunks of it, is run
    RUNNING = auto()  # has slots
    DONE = auto()  # nothing more is generated


class Sequence(Transcript):
    """One row of a request and its beams, on its way from the queue through the batch.

    Attributes:
        reservation: its pages.
        state: how far it is.
        is_done: whether that is DONE; an attribute, for each step asks each row.
        slots: of the beams, while it is in the batch.
        chunks: hidden states of the chunks that were run, [T, hidden]; where nothing needs them, the last one's end.
        has_failed: whether a step that it shared has failed; then its context is run alone.
        isolate_until: it runs alone until it has this many tokens.
        context_outputs: its outputs that depend on its context alone, by name; see scheduling/contexts.py.
        due: when it is its turn to join the batch; see scheduling/turns.py.
        times: for the metrics.
        holds_place: whether it holds the place of its adapter on the device.
        drafting: what its drafts are made from; None: it has none.
        origin: the sequence that it stands for, see ``assume``; None: it is one itself.
    """

    def __init__(self, job: Job, row: int, allocator: PageAllocator) -> None:
        super().__init__(job.request.rows[row], job.grammars[row] if job.grammars else None)
        self.job, self.row = job, row
        self.reservation = Reservation(self, allocator)
        self.slots: list[int] = []
        self.chunks: list[Tensor] = []
        self.has_failed, self.isolate_until = False, 0
        self.context_outputs: dict[str, Array] = {}
        self.due, self.times, self.holds_place = 0.0, RowTimes(), False
        self.drafting: Drafting | None = None
        self.origin: Sequence | None = None
        self._enter(State.WAITING)

    def _enter(self, state: State) -> None:
        self.state, self.is_done = state, state is State.DONE

    @property
    def is_isolated(self) -> bool:
        """Whether it must be alone in a step."""
        return self.count < self.isolate_until

    @property
    def needs_step(self) -> bool:
        """Whether more tokens are to be launched; an encoder without a decoder is done before the first step."""
        return not self.is_done and self.launched < max(1, self.max_tokens)

    def set_due(self, due: float) -> None:
        """Set when it is its turn to begin; one that has begun is due at once, also when it waits again."""
        self.due = due

    @property
    def place(self) -> int:
        """The place of its adapter on the device; -1: it has none."""
        return -1 if self.adapter is None or self.adapter.place is None else self.adapter.place

    @property
    def skipped(self) -> int:
        """Tokens of its context that need not be run: the cache has them."""
        return self.reservation.skipped

    @property
    def position(self) -> int:
        """The position of the first token of its context that is to be run."""
        return self.start + self.reservation.skipped

    def begin_prefill(self, tokens: int = 0) -> None:
        """Take the pages for the next tokens of its context, or for all that are left.

        Raises:
            EngineError: there are too few.
        """
        if self.adapter and not self.holds_place:
            self.adapter.hold()
            self.holds_place = True
        self._enter(State.PREFILLING)
        self.job.has_begun, self.due = True, AT_ONCE
        self.reservation.take(tokens)

    def note_chunk(self, count: int, hidden: Tensor) -> None:
        """Note that the next ``count`` tokens of its context were run, with these hidden states, which are copied."""
        if self.needs_hidden:
            self.chunks.append(hidden.clone())
        else:
            self.chunks = [hidden[-1:].clone()]
        self.reservation.note_chunk(count)

    def take_chunks(self) -> list[Tensor]:
        """Return the hidden states of its chunks, which it needs no longer."""
        chunks, self.chunks = self.chunks, []
        return chunks

    def join(self, slots: list[int]) -> None:
        """Join the batch in these slots, of a beam each; or move to them, where others have left it."""
        self.slots = slots
        for pages, slot in zip(self.reservation.rows, slots, strict=True):
            pages.slot = slot
        if self.state is State.PREFILLING:
            self._enter(State.RUNNING)

    def add_context_outputs(self, **outputs: Array) -> None:
        """Add outputs that depend on its context alone."""
        self.context_outputs |= outputs

    def finish_encoding(self) -> None:
        """End without a token: there is no decoder."""
        self._enter(State.DONE)

    @staticmethod
    def note_launch(sequences: Iterable[Sequence]) -> None:
        """Count a launched token of each."""
        for sequence in sequences:
            sequence.launched += 1

    def assume(self, draft: Several[int]) -> Sequence:
        """Return what stands for it during one step in a slot of its own, as if the tokens of a draft followed."""
        assumed, beam = copy(self), self.beams[0]
        assumed.origin, assumed.count = self, self.count + len(draft)
        assumed.beams = [Beam(beam.tokens + array("I", draft))]
        assumed.guided = self.guided and self.guided.fork()
        return assumed

    @property
    def is_right(self) -> bool:
        """Whether its origin has got the tokens that it assumes, and goes on."""
        origin = self.origin
        if origin is None or origin.is_done or origin.count != self.count or (self.guided and self.guided.problem):
            return False
        return origin.beams[0].tokens[-1] == self.beams[0].tokens[-1]

    def end_step(self) -> None:
        """Count a step whose tokens were appended; after the last one put the beams in order."""
        self.count += 1
        all_ended = self.beams[0].has_ended and all(beam.has_ended for beam in self.beams)
        if all_ended or self.count >= self.max_tokens or len(self.endings) == self.width:
            self._enter(State.DONE)
            if self.source and self.width > 1 and self.max_tokens:
                self._settle_endings()

    def leave(self) -> None:
        """Free its pages and slots; what it has generated stays."""
        if self.adapter and self.holds_place:
            self.adapter.release()
            self.holds_place = False
        self.reservation.release()
        self.slots, self.chunks = [], []
        if not self.is_done:
            self._enter(State.WAITING)

    def preempt(self) -> None:
        """Wait again because memory has run out, after it has left, with all that was generated; see ``inputs``."""
        self.launched = self.count

    def restart(self) -> None:
        """Drop what was generated, after a step that has failed, and run alone until there is as much again."""
        self.has_failed, self.isolate_until = True, max(self.isolate_until, self.launched)
        self._begin()
        self._enter(State.WAITING)

    def save_session(self) -> None:
        """Keep what its session continues from; its pages are the session's from now on."""
        tokens = [*self.shown.tolist(), *self.beams[0].tokens]
        if self.beams[0].has_ended:
            tokens.pop()
        self.session_row = SessionRow(tokens, *self.reservation.save(min(self.cached, len(tokens))))
