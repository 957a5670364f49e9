"""A request on its way: what it waits for, where its sequences sit, what has come out, and what it is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..cache.sizing import UNBOUNDED
from ..request.parse import Array, Request
from ..sampling.beam import DEAD, Beam, Candidate

if TYPE_CHECKING:
    from .sessions import Line

INVALID, FAILED, CANCELLED = "INVALID_ARG", "INTERNAL", "CANCELLED"  # names of Triton's error codes


@dataclass(frozen=True)
class Answer:
    """What a request gets.

    Attributes:
        tensors: the output so far by FasterTransformer's names, see outputs.py; None with a problem.
        problem: why there is none.
        is_final: whether this is the last answer. A request that does not stream gets one only.
        code: the problem's kind, a name of pb_utils.TritonError.
    """

    tensors: dict[str, Array] | None
    problem: str | None = None
    is_final: bool = True
    code: str = ""


@dataclass(eq=False)
class Job:
    """A request that has been submitted.

    Attributes:
        request: what is asked for.
        answer: takes the answers.
        is_streaming: whether it is answered after every token.
        is_cancelled: says whether anybody still waits.
        session: key of the conversation that it continues; None: none.
        sequences: of its rows, as soon as it waits for its turn.
        has_begun: whether one of them has been in the batch.
    """

    request: Request
    answer: Callable[[Answer], None]
    is_streaming: bool = False
    is_cancelled: Callable[[], bool] | None = None
    session: int | str | None = None
    sequences: list[Sequence] = field(default_factory=list)
    has_begun: bool = False

    @property
    def is_done(self) -> bool:
        """Whether no sequence is still generated."""
        return all(sequence.is_done for sequence in self.sequences)

    @property
    def has_news(self) -> bool:
        """Whether every row that was begun anew has something that may not have been answered before."""
        return all(each.is_done or each.count >= each.alone_for for each in self.sequences)


@dataclass(eq=False)
class Sequence:
    """One row of a request and its beams.

    Attributes:
        job: whose row it is.
        row: which.
        shown: int64 [n], what its answer begins with: a conversation so far, and the input without prompts.
        beams: what has been generated; see begin.
        endings: beams that were taken out, of an encoder-decoder.
        count: tokens of each beam that the host knows.
        launched: tokens of each beam that have been asked for.
        is_done: nothing more is generated.
        slots: of the beams, while it is in the batch.
        alone_for: tokens that it makes without any other sequence, because a step that it took with others has failed;
            0: their contexts have failed, and its own is run alone; -1: nothing has failed.
        numbers: what sampling is told of it, as soon as it has a slot; see choice.py.
        noted: its part of the outputs that its context alone gives, by name; see contexts.py.
        line: the row of a conversation that it continues; see sessions.py.
        start: entries that the cache has of it before its context: a conversation's, or a prefix prompt's.
        lacks_past: whether the conversation's entries are not there any more, and must be made again.
        window: entries that are kept at most.
    """

    job: Job
    row: int
    slots: list[int] = field(default_factory=list)
    alone_for: int = -1
    numbers: dict[str, Any] = field(default_factory=dict)
    noted: dict[str, Array] = field(default_factory=dict)
    line: Line | None = None
    lacks_past: bool = False
    window: int = UNBOUNDED

    def __post_init__(self) -> None:
        """Take its row of the request."""
        request, self.width = self.job.request, self.job.request.beam_width
        self.limit = int(request.output_lengths[self.row])
        self.end_id = int(request.scalars["end_id"][self.row])
        self.shown = request.shown[self.row]
        self.context = request.contexts[self.row]
        self.start = self.context.prefix_length
        self.source = request.sources[self.row] if request.sources else None
        self.source_length = len(self.source.ids) if self.source else 0
        self.bad_words, self.stop_words = request.bad_words[self.row], request.stop_words[self.row]
        # Its next tokens cannot be chosen before the host knows the last ones, or it has no room for more.
        self.needs_host = self.width > 1 or bool(self.bad_words) or not self.limit
        self.begin()

    def begin(self) -> None:
        """Have nothing generated yet."""
        self.beams = [Beam(score=DEAD if beam else 0.0) for beam in range(self.width)]
        self.endings: list[Beam] = []
        self.count = self.launched = 0
        self.is_done = False

    def begin_anew(self) -> None:
        """Have nothing generated any more, after a step that has failed; see alone_for."""
        self.alone_for = max(self.alone_for, self.launched)
        self.begin()

    @property
    def entries(self) -> int:
        """Of the cache that each beam takes in the end."""
        return min(self.start + len(self.context.ids) + self.limit, self.window)

    @property
    def need(self) -> tuple[int, int, int]:
        """What the cache must have room for; see cache.Need."""
        return self.width, self.entries, self.source_length

    @property
    def goes_on(self) -> bool:
        """Whether more tokens are to be asked for; an encoder alone has done all before the first step."""
        return not self.is_done and self.launched < max(1, self.limit)

    @property
    def cached(self) -> int:
        """Tokens of each beam that have keys and values, or will have when what was asked for is done."""
        if self.source:  # the last token of its context begins with a step
            return len(self.context.ids) - 1 + self.launched
        return self.start + len(self.context.ids) + max(0, self.launched - 1)

    @property
    def held(self) -> int:
        """Entries of the cache that these take."""
        return min(self.cached, self.window)

    def wants(self, name: str) -> bool:
        """Say whether it has is_return_<name>."""
        return bool(self.job.request.scalars[f"is_return_{name}"][self.row])

    def tail(self, beam: Beam, count: int) -> list[int]:
        """Give the last tokens of its shown input and a beam's output."""
        missing = count - len(beam.tokens)
        if missing > 0:
            return [*self.shown[-missing:].tolist(), *beam.tokens]
        return beam.tokens[len(beam.tokens) - count :].tolist()

    def put(self, beam: Beam, token: int, gain: float | None = None, log_prob: float = 0.0) -> None:
        """Put a token behind a beam.

        Args:
            beam: of it.
            token: is put there.
            gain: what it adds to the score; None: nobody asks for that, nor for ``log_prob``.
            log_prob: what is answered as its log-probability.
        """
        words = self.stop_words
        is_stop = bool(words) and words.is_completed_by(token, self.tail(beam, words.reach))
        beam.tokens.append(token)
        beam.has_ended = is_stop or token == self.end_id
        if gain is not None:
            beam.score += gain
            beam.log_probs.append(log_prob)

    @property
    def beam_length(self) -> int:
        """What beam search divides by at the coming step; see beam.py."""
        if self.source:
            return self.count + 1
        return len(self.context.ids) + len(self.beams[0].tokens) - self.beams[0].has_ended

    def branch(self, found: list[Candidate]) -> list[Candidate]:
        """Choose the beams that go on, from what beam.candidates gave; give those chosen, K of them."""
        if self.source:
            found = [each for place, each in enumerate(found) if not self._take_out(each, place)]
        chosen = found[: self.width]
        self.beams = [self._child(each) for each in chosen]
        return chosen

    def _child(self, found: Candidate) -> Beam:
        parent = self.beams[found.parent]
        child = Beam(parent.tokens[:], parent.log_probs[:], found.score, parent.has_ended, found.rank)
        if not parent.has_ended:
            self.put(child, found.token, 0.0, found.gain)
        return child

    def _take_out(self, found: Candidate, place: int) -> bool:
        """Say whether a candidate ends; keep it, if it is among the K best."""
        has_ended = self.beams[found.parent].has_ended or found.token == self.end_id
        if has_ended and place < self.width:
            self._keep(self._child(found))
        return has_ended

    def _keep(self, ending: Beam) -> None:
        self.endings = sorted([*self.endings, ending], key=lambda each: -each.rank)[: self.width]

    def finish(self) -> None:
        """Note that a step's tokens are known; after the last one put the beams in order."""
        self.count += 1
        all_ended = all(beam.has_ended for beam in self.beams)
        self.is_done = all_ended or self.count >= self.limit or len(self.endings) == self.width
        if self.is_done and self.source and self.width > 1 and self.limit:
            self._settle_endings()

    def _settle_endings(self) -> None:
        """Put the K best in place of the beams, those that have not ended among them unless K have."""
        penalty = float(self.job.request.scalars["len_penalty"][self.row])
        for beam in self.beams if len(self.endings) < self.width else ():
            beam.rank = beam.score / len(beam.tokens) ** penalty
            self._keep(beam)
        self.beams = self.endings
