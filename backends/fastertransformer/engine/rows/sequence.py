"""A submitted request and its sequences, one for each row."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from ..arrays import UNBOUNDED, Array
from ..cache.page_pool import RowPages
from ..grammar.guided_row import Grammar
from ..request.parse import Request
from .answer import Answer, Outline
from .beam import DEAD, Beam, Candidate, FinishReason


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


@dataclass
class SessionRow:
    """One row of a session, after a request."""

    tokens: list[int] = field(default_factory=list)  # of the whole conversation
    cached: int = 0  # how many of them have keys and values
    saved: list[int] | None = None  # their pages; None: they are in the batch, or lost


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
        return part[1] if part else self

    @property
    def is_done(self) -> bool:
        """Whether no sequence is still generated."""
        return all(sequence.is_done for sequence in self.sequences)

    @property
    def has_news(self) -> bool:
        """Whether every restarted row is past the tokens that may have been answered before its restart."""
        return all(not each.is_isolated or each.is_done for each in self.sequences)


@dataclass(eq=False)
class Sequence:
    """One row of a request and its beams.

    Attributes:
        job: the request.
        row: index in the request.
        shown: int64 [n], what its answer begins with: the session so far, and the input without prompts.
        sampling: its parameters.
        beams: generated tokens and scores.
        endings: beams that have ended and were removed from the search, of an encoder-decoder.
        count: tokens of each beam that the host knows.
        launched: tokens of each beam for which a step was launched.
        is_done: whether nothing more is generated.
        slots: of the beams, while it is in the batch.
        pages: of the beams, while it is in the batch; of the first beam, while its context is run in chunks.
        room: it has pages for as many launched tokens.
        skipped: tokens of its context whose keys and values were found in the prefix cache, or run as chunks.
        chunks: hidden states of the chunks that were run, [T, hidden]; where nothing needs them, the last one's end.
        stage: the part of its prefill pass in which its context is run; see contexts.py.
        isolate_until: it runs alone until it has this many tokens, because a step that it shared has failed (0: the
            prefill has failed, and is repeated alone); None: no step has failed.
        context_outputs: its outputs that depend on its context alone, by name; see contexts.py.
        session_row: the row of a session that it continues; see sessions.py.
        start: entries of the cache before its context: a session's, or a prefix prompt's.
        lacks_past: whether the session's entries were lost, and must be computed again.
        window: entries of the cache that are kept at most.
        due: when it is its turn to join the batch; see turns.py.
        times: for the metrics.
    """

    job: Job
    row: int
    slots: list[int] = field(default_factory=list)
    pages: list[RowPages] = field(default_factory=list)
    room: int = 0
    skipped: int = 0
    chunks: list[Tensor] = field(default_factory=list)
    stage: int = 0
    isolate_until: int | None = None
    context_outputs: dict[str, Array] = field(default_factory=dict)
    session_row: SessionRow | None = None
    lacks_past: bool = False
    window: int = UNBOUNDED
    due: float = 0.0
    times: RowTimes = field(default_factory=RowTimes)

    def __post_init__(self) -> None:
        """Take its row of the request."""
        row = self.job.request.rows[self.row]
        self.sampling, self.context, self.shown, self.source = row.sampling, row.context, row.shown, row.source
        self.width, self.max_tokens, self.end_id = row.sampling.beam_width, row.sampling.max_tokens, row.sampling.end_id
        self.start = self.context.prefix_length
        self.source_length = len(self.source.ids) if self.source else 0
        self.bad_words, self.stop_words = self.sampling.bad_words, self.sampling.stop_words
        self.end_ids = self.sampling.stop_token_ids | {self.end_id}
        # The host must know its last tokens before the next are chosen, or it has no room for more.
        grammar = self.job.grammars[self.row] if self.job.grammars else None
        self.guided = grammar.begin(self.end_ids) if grammar else None
        self.needs_host = self.width > 1 or bool(self.bad_words) or not self.max_tokens
        self._begin()

    def _begin(self) -> None:
        self.beams = [Beam(score=DEAD if beam else 0.0) for beam in range(self.width)]
        self.endings: list[Beam] = []
        self.count = self.launched = 0
        self.is_done = False

    def restart(self) -> None:
        """Drop what was generated, after a step that has failed; see isolate_until."""
        self.isolate_until = max(self.isolate_until or 0, self.launched)
        self._begin()

    def set_back(self) -> None:
        """Leave the batch because memory has run out, with all that was generated; see ``inputs``."""
        self.launched, self.slots = self.count, []

    def inputs(self, beam: int = 0) -> Array:
        """Give the tokens that a beam's context is run with, [T]: what was generated before it was set back, too."""
        if not self.count:
            return self.context.ids
        # All beams have one position. Of one that has ended, what is behind its last token is never used.
        tokens = np.zeros(self.count, np.int64)
        tokens[: len(self.beams[beam].tokens)] = self.beams[beam].tokens
        return np.concatenate((self.context.ids, tokens))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its input, an encoder's if there is one; embeddings that stand for tokens do not count."""
        row = self.job.request.rows[self.row]
        return int((row.source or row.context).own_tokens.sum())

    @property
    def is_isolated(self) -> bool:
        """Whether it must be alone in a step."""
        return self.isolate_until is not None and self.count < self.isolate_until

    @property
    def needs_hidden(self) -> bool:
        """Whether outputs need the hidden states of all of its context; once it has tokens, these outputs are there."""
        params = self.sampling
        scores = params.is_return_context_cum_log_probs or params.is_return_context_log_probs
        return not self.count and (scores or params.is_return_context_embeddings)

    @property
    def max_entries(self) -> int:
        """Entries of the cache that each beam takes at the end."""
        return min(self.start + len(self.context.ids) + self.max_tokens, self.window)

    @property
    def first_entries(self) -> int:
        """Entries of the cache that a beam takes when its context is run."""
        return min(self.start + len(self.context.ids) + self.count, self.max_entries)

    @property
    def next_position(self) -> int:
        """The position of the first token that is decoded, when it joins the batch."""
        return self.start + len(self.context.ids) + self.count - (1 if self.source else 0)

    @property
    def needs_step(self) -> bool:
        """Whether more tokens are to be launched; an encoder without a decoder is done before the first step."""
        return not self.is_done and self.launched < max(1, self.max_tokens)

    @property
    def cached(self) -> int:
        """Tokens of each beam whose keys and values are cached when the launched steps are done."""
        if self.source:  # the first step runs the last token of its context
            return len(self.context.ids) - 1 + self.launched
        return self.start + len(self.context.ids) + max(0, self.launched - 1)

    @property
    def cached_entries(self) -> int:
        """Entries of the cache that a beam's cached tokens take."""
        return min(self.cached, self.window)

    def tail(self, beam: Beam, count: int) -> list[int]:
        """Give the last tokens of its shown input and a beam's output."""
        missing = count - len(beam.tokens)
        if missing > 0:
            return [*self.shown[-missing:].tolist(), *beam.tokens]
        return beam.tokens[len(beam.tokens) - count :].tolist()

    def append(
        self, beam: Beam, token: int, gain: float | None = None, log_prob: float = 0.0, raw_scores: bytes = b""
    ) -> None:
        """Append a token to a beam.

        Args:
            beam: of this sequence.
            token: to append.
            gain: is added to the score; None: the request needs neither the score nor ``log_prob``.
            log_prob: the token's log-probability in the answer.
            raw_scores: see Beam; empty: the request does not need them.
        """
        words = self.stop_words
        is_stop = bool(words) and words.is_completed_by(token, self.tail(beam, words.reach))
        beam.tokens.append(token)
        if token in self.end_ids:
            beam.finish = FinishReason.END_ID
        elif is_stop:
            beam.finish = FinishReason.STOP_WORDS
        beam.raw_scores.frombytes(raw_scores)
        if gain is not None:
            beam.score += gain
            beam.log_probs.append(log_prob)

    @property
    def beam_length(self) -> int:
        """The length by which beam search divides scores in the coming step; see sampling/beam.py."""
        if self.source:
            return self.count + 1
        return len(self.context.ids) + len(self.beams[0].tokens) - self.beams[0].has_ended

    def branch(self, found: list[Candidate]) -> list[Candidate]:
        """Choose the K best of the candidates, and make them this sequence's beams."""
        if self.source:
            found = [each for place, each in enumerate(found) if not self._remove_ended(each, place)]
        chosen = found[: self.width]
        self.beams = [self._child(each) for each in chosen]
        return chosen

    def _child(self, found: Candidate) -> Beam:
        parent = self.beams[found.parent]
        child = Beam(parent.tokens[:], parent.log_probs[:], found.score, parent.finish, found.rank)
        if not parent.has_ended:
            self.append(child, found.token, 0.0, found.gain)
        return child

    def _remove_ended(self, found: Candidate, place: int) -> bool:
        """Say whether a candidate has ended; store it if it is among the K best."""
        has_ended = self.beams[found.parent].has_ended or found.token == self.end_id
        if has_ended and place < self.width:
            self._add_ending(self._child(found))
        return has_ended

    def _add_ending(self, ending: Beam) -> None:
        self.endings = sorted([*self.endings, ending], key=lambda each: -each.rank)[: self.width]

    def end_step(self) -> None:
        """Count a step whose tokens were appended; after the last one put the beams in order."""
        self.count += 1
        all_ended = self.beams[0].has_ended and all(beam.has_ended for beam in self.beams)
        self.is_done = all_ended or self.count >= self.max_tokens or len(self.endings) == self.width
        if self.is_done and self.source and self.width > 1 and self.max_tokens:
            self._settle_endings()

    def _settle_endings(self) -> None:
        """Replace the beams by the K best that have ended, and, if fewer than K have ended, the best others."""
        for beam in self.beams if len(self.endings) < self.width else ():
            beam.rank = beam.score / len(beam.tokens) ** self.sampling.len_penalty
            self._add_ending(beam)
        self.beams = self.endings
