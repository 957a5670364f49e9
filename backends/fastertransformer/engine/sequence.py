"""A request on its way: what it waits for, where its sequences sit, what has come out, and what it is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .beam import DEAD
from .request import Array, Request

INVALID, FAILED, CANCELLED = "INVALID_ARG", "INTERNAL", "CANCELLED"  # names of Triton's error codes


@dataclass(frozen=True)
class Answer:
    """What a request gets.

    Attributes:
        tensors: the output so far by FasterTransformer's names, see output_tensors; None with a problem.
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
        sequences: of its rows.
        session: key of the conversation that it continues; None: none.
    """

    request: Request
    answer: Callable[[Answer], None]
    is_streaming: bool = False
    is_cancelled: Callable[[], bool] | None = None
    sequences: list[Sequence] = field(default_factory=list)
    session: int | str | None = None

    def __post_init__(self) -> None:
        """Make its sequences."""
        self.sequences = [Sequence(self, row) for row in range(self.request.batch_size)]

    @property
    def is_done(self) -> bool:
        """Whether no sequence is still generated."""
        return all(sequence.is_done for sequence in self.sequences)


@dataclass(eq=False)
class Sequence:
    """One row of a request and its beams.

    Attributes:
        job: whose row it is.
        row: which.
        tokens: generated so far, by beam.
        log_probs: of these tokens, likewise; empty where nobody wants them.
        scores: cum_log_probs by beam.
        has_ended: by beam.
        slots: of the beams, while it is in the batch.
        count: steps that it has taken part in.
        is_done: nothing more is generated.
        runs_alone: whether it failed together with others and is tried on its own.
        context_embedding: fp32 [hidden], where it is wanted.
        start: entries that the cache has of it before its context: a conversation's.
        window: entries that are kept at most; 0: all.
    """

    job: Job
    row: int
    tokens: list[list[int]] = field(init=False)
    log_probs: list[list[float]] = field(init=False)
    scores: list[float] = field(init=False)
    has_ended: list[bool] = field(init=False)
    slots: list[int] = field(default_factory=list)
    count: int = 0
    is_done: bool = False
    runs_alone: bool = False
    context_embedding: Array | None = None
    start: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        """Begin with nothing generated."""
        request, self.width = self.job.request, self.job.request.beam_width
        self.limit = int(request.output_lengths[self.row])
        self.end_id = int(request.scalars["end_id"][self.row])
        self.shown = request.input_ids[self.row, : request.input_lengths[self.row]].tolist()
        self.context = request.contexts[self.row]
        self.bad_words, self.stop_words = request.bad_words[self.row], request.stop_words[self.row]
        self.tokens = [[] for _ in range(self.width)]
        self.log_probs = [[] for _ in range(self.width)]
        self.scores = [0.0] + [DEAD] * (self.width - 1)
        self.has_ended = [False] * self.width

    @property
    def need(self) -> int:
        """Entries of the cache that each beam takes in the end."""
        most = self.start + len(self.context.ids) + self.limit
        return min(most, self.window) if self.window else most

    def wants(self, name: str) -> bool:
        """Say whether it has is_return_<name>."""
        return bool(self.job.request.scalars[f"is_return_{name}"][self.row])

    def tail(self, beam: int, count: int) -> list[int]:
        """Give the last tokens of a beam's shown input and output."""
        tokens = self.tokens[beam]
        missing = count - len(tokens)
        return [*self.shown[-missing:], *tokens] if missing > 0 else tokens[len(tokens) - count :]

    def take(self, beam: int, token: int) -> None:
        """Put a token behind a beam."""
        is_stop = bool(self.stop_words) and self.stop_words.is_completed_by(
            token, self.tail(beam, self.stop_words.reach)
        )
        self.tokens[beam].append(token)
        self.has_ended[beam] = is_stop or token == self.end_id


def output_tensors(job: Job) -> dict[str, Array]:
    """Lay out the output so far as FasterTransformer does.

    Returns:
        output_ids: uint32 [B, K, L + max request_output_len]: each row's input, its tokens right behind it, then its
            end_id.
        sequence_length: uint32 [B, K]: input and generated tokens, a final end_id included. (FasterTransformer counts
            from the longest input of the batch; here it is the row's own, so it does not depend on other rows.)
        response_input_lengths: int32 [B, K].
        cum_log_probs: fp32 [B, K], and output_log_probs: fp32 [B, K, max request_output_len]: only where a row has
            is_return_log_probs; 0 in the others. With is_return_context_cum_log_probs the first begins with the
            log-probabilities (without temperature and penalty) of the input's tokens from the second on. Of a beam
            they are those of its own tokens. (FasterTransformer does not follow a beam back in output_log_probs.)
        context_embeddings: fp32 [B, K, hidden]: only where a row has is_return_context_embeddings.
    """
    request = job.request
    batch, width = request.batch_size, request.beam_width
    longest, shown = int(request.output_lengths.max()), request.input_ids.shape[1]
    ids = np.repeat(request.scalars["end_id"].astype(np.uint32), width * (shown + longest))
    ids = ids.reshape(batch, width, shown + longest)
    lengths, inputs = np.zeros((batch, width), np.uint32), np.zeros((batch, width), np.int32)
    scores, log_probs = np.zeros((batch, width), np.float32), np.zeros((batch, width, longest), np.float32)
    for row, sequence in enumerate(job.sequences):
        start = len(sequence.shown)
        ids[row, :, :start] = sequence.shown
        inputs[row] = start
        for beam, tokens in enumerate(sequence.tokens):
            ids[row, beam, start : start + len(tokens)] = tokens
            lengths[row, beam] = start + len(tokens)
            if sequence.wants("log_probs"):
                scores[row, beam] = sequence.scores[beam]
                log_probs[row, beam, : len(tokens)] = sequence.log_probs[beam]
    tensors: dict[str, Array] = {"output_ids": ids, "sequence_length": lengths, "response_input_lengths": inputs}
    if request.wants("log_probs"):
        tensors |= {"cum_log_probs": scores, "output_log_probs": log_probs}
    if request.wants("context_embeddings"):
        tensors["context_embeddings"] = _context_embeddings(job)
    return tensors


def _context_embeddings(job: Job) -> Array:
    known = [sequence.context_embedding for sequence in job.sequences]
    hidden = next((len(each) for each in known if each is not None), 0)
    rows = [np.zeros(hidden, np.float32) if each is None else each for each in known]
    return np.repeat(np.stack(rows)[:, None], job.request.beam_width, axis=1)
