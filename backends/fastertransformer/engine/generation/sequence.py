"""A request on its way: what it waits for, where its sequences sit, what has come out, and what it is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..requests.request import Array, Request
from .beam import DEAD, Candidate, Ending

if TYPE_CHECKING:
    from .sessions import Line
    from .slots import Traits

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
    _laid: Array | None = None  # output_ids so far, see lay_out_ids

    def __post_init__(self) -> None:
        """Make its sequences."""
        self.sequences = [Sequence(self, row) for row in range(self.request.batch_size)]

    @property
    def is_done(self) -> bool:
        """Whether no sequence is still generated."""
        return all(sequence.is_done for sequence in self.sequences)

    def lay_out_ids(self) -> Array:
        """Give output_ids as far as they are known; see output_tensors.

        What has been laid out once stays, but for beams, which change their tokens: a stream asks at every token.
        """
        request = self.request
        if self._laid is None or request.beam_width > 1:
            shown = max(request.input_ids.shape[1], *(len(sequence.shown) for sequence in self.sequences))
            fill = np.zeros(request.batch_size) if request.sources else request.scalars["end_id"]
            shape = request.batch_size, request.beam_width, shown + int(request.output_lengths.max())
            self._laid = np.repeat(fill.astype(np.uint32), shape[1] * shape[2]).reshape(shape)
            for row, sequence in enumerate(self.sequences):
                self._laid[row, :, : len(sequence.shown)] = sequence.shown
                sequence.laid = 0
        for row, sequence in enumerate(self.sequences):
            for beam, tokens in enumerate(sequence.tokens):
                start = len(sequence.shown)
                self._laid[row, beam, start + sequence.laid : start + len(tokens)] = tokens[sequence.laid :]
            sequence.laid = len(sequence.tokens[0])
        return self._laid.copy()

    def begin_anew(self, sequence: Sequence) -> None:
        """Put a sequence in its row's place."""
        self.sequences[sequence.row], self._laid = sequence, None

    @property
    def is_known(self) -> bool:
        """Whether a row that was begun anew has nothing yet that was not answered before."""
        return any(each.count <= each.answered for each in self.sequences if each.answered)


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
        endings: beams that were taken out, of an encoder-decoder.
        count: tokens of each beam that the host knows.
        launched: tokens of each beam that have been asked for.
        is_done: nothing more is generated.
        runs_alone: whether its context failed together with others' and is run on its own.
        is_suspect: whether a step failed that it took with others; it takes no more with any.
        answered: tokens that were answered before it was begun anew.
        laid: tokens that its job has laid out.
        traits: what it needs of a step, as soon as it has a slot.
        encoded: [S, hidden], where the answer is what the encoder makes.
        attentions: fp32 [layers, heads, S, S], where they are wanted beside it.
        context_embedding: fp32 [hidden], where it is wanted.
        context_scores: log-probability of each of the context's own tokens and the most probable one in its place,
            where they are wanted.
        line: the row of a conversation that it continues; see sessions.py.
        start: entries that the cache has of it before its context: a conversation's, or a prefix prompt's.
        known: tokens of the conversation before the request.
        lacks_past: whether the conversation's entries are not there any more, and must be made again.
        window: entries that are kept at most; 0: all.
    """

    job: Job
    row: int
    tokens: list[list[int]] = field(init=False)
    log_probs: list[list[float]] = field(init=False)
    scores: list[float] = field(init=False)
    has_ended: list[bool] = field(init=False)
    slots: list[int] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    count: int = 0
    launched: int = 0
    is_done: bool = False
    runs_alone: bool = False
    is_suspect: bool = False
    answered: int = 0
    laid: int = 0
    traits: Traits | None = None
    encoded: Array | None = None
    attentions: Array | None = None
    context_embedding: Array | None = None
    context_scores: tuple[Array, Array] | None = None
    line: Line | None = None
    start: int = 0
    known: int = 0
    lacks_past: bool = False
    window: int = 0

    def __post_init__(self) -> None:
        """Begin with nothing generated."""
        request, self.width = self.job.request, self.job.request.beam_width
        self.limit = int(request.output_lengths[self.row])
        self.end_id = int(request.scalars["end_id"][self.row])
        self.shown = request.input_ids[self.row, : request.input_lengths[self.row]].tolist()
        self.context = request.contexts[self.row]
        self.start = self.context.prefix_length
        self.source = request.sources[self.row] if request.sources else None
        self.bad_words, self.stop_words = request.bad_words[self.row], request.stop_words[self.row]
        self.tokens = [[] for _ in range(self.width)]
        self.log_probs = [[] for _ in range(self.width)]
        self.scores = [0.0] + [DEAD] * (self.width - 1)
        self.has_ended = [False] * self.width

    def begin_anew(self) -> Sequence:
        """Put a suspect that has nothing yet in its place, and give it."""
        fresh = Sequence(self.job, self.row, is_suspect=True, answered=max(self.answered, self.count))
        fresh.line, fresh.start, fresh.known, fresh.window = self.line, self.start, self.known, self.window
        fresh.context, fresh.shown = self.context, self.shown
        self.job.begin_anew(fresh)
        return fresh

    @property
    def need(self) -> int:
        """Entries of the cache that each beam takes in the end."""
        most = self.start + len(self.context.ids) + self.limit
        return min(most, self.window) if self.window else most

    @property
    def steps(self) -> int:
        """How many it takes part in at most; an encoder's is over before the first."""
        return 0 if self.is_done else max(1, self.limit)

    @property
    def cached(self) -> int:
        """Tokens of each beam that have keys and values, or will have when what was asked for is done."""
        if self.source:  # the last token of its context begins with a step
            return len(self.context.ids) - 1 + self.launched
        return self.start + len(self.context.ids) + max(0, self.launched - 1)

    @property
    def needs_host(self) -> bool:
        """Whether its next tokens cannot be chosen before the host knows the last ones, or it has no room for more."""
        return self.width > 1 or bool(self.bad_words) or not self.limit

    @property
    def source_length(self) -> int:
        """Tokens that the encoder is given; 0 without one."""
        return len(self.source.ids) if self.source else 0

    def wants(self, name: str) -> bool:
        """Say whether it has is_return_<name>."""
        return bool(self.job.request.scalars[f"is_return_{name}"][self.row])

    def tail(self, beam: int, count: int) -> list[int]:
        """Give the last tokens of a beam's shown input and output."""
        tokens = self.tokens[beam]
        missing = count - len(tokens)
        return [*self.shown[-missing:], *tokens] if missing > 0 else tokens[len(tokens) - count :]

    @property
    def beam_length(self) -> int:
        """What beam search divides by at the coming step; see beam.py."""
        if self.source:
            return self.count + 1
        return len(self.context.ids) + len(self.tokens[0]) - self.has_ended[0]

    def branch(self, found: list[Candidate]) -> list[Candidate]:
        """Choose the beams that go on, from what beam.candidates gave; give those chosen, K of them."""
        chosen = found[: self.width] if self.source is None else self._take_out(found)
        had_ended = [self.has_ended[each.parent] for each in chosen]
        self.tokens = [list(self.tokens[each.parent]) for each in chosen]
        self.log_probs = [list(self.log_probs[each.parent]) for each in chosen]
        self.scores, self.has_ended = [each.score for each in chosen], had_ended
        for beam, each in enumerate(chosen):
            if not had_ended[beam]:
                self.log_probs[beam].append(each.gain)
                self.take(beam, each.token)
        return chosen

    def _take_out(self, found: list[Candidate]) -> list[Candidate]:
        """Keep the candidates that end, if they are among the K best; give the K best of the others."""
        chosen: list[Candidate] = []
        for place, each in enumerate(found):
            had_ended = self.has_ended[each.parent]
            if not had_ended and each.token != self.end_id:
                chosen.append(each)
            elif place < self.width:
                new = ([], []) if had_ended else ([each.token], [each.gain])
                tokens, log_probs = self.tokens[each.parent] + new[0], self.log_probs[each.parent] + new[1]
                self.keep(Ending(each.rank, each.score, tokens, log_probs))
        return chosen[: self.width]

    def keep(self, ending: Ending) -> None:
        """Keep a beam that was taken out, if it is among the K best."""
        self.endings = sorted([*self.endings, ending], key=lambda each: -each.rank)[: self.width]

    def finish(self) -> bool:
        """Say whether the step just taken was the last one; if so, put the beams in order."""
        is_last = all(self.has_ended) or self.count >= self.limit or len(self.endings) == self.width
        if is_last and self.source and self.width > 1 and self.limit:
            self._settle_endings()
        return is_last

    def _settle_endings(self) -> None:
        """Put the K best in place of the beams, those that have not ended among them unless K have."""
        penalty = float(self.job.request.scalars["len_penalty"][self.row])
        if len(self.endings) < self.width:
            for score, tokens, log_probs in zip(self.scores, self.tokens, self.log_probs, strict=True):
                self.keep(Ending(score / len(tokens) ** penalty, score, tokens, log_probs))
        self.tokens = [ending.tokens for ending in self.endings]
        self.log_probs = [ending.log_probs for ending in self.endings]
        self.scores = [ending.score for ending in self.endings]

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
            end_id. Of an encoder-decoder int32 [B, K, T + max max_output_len]: what the decoder began with, its
            tokens, then 0; here and below its "input" is decoder_input_ids, [B, T], T = 0 without one.
        sequence_length: uint32 [B, K]: input and generated tokens, a final end_id included. (FasterTransformer counts
            from the longest input of the batch; here it is the row's own, so it does not depend on other rows.) Of an
            encoder-decoder int32.
        response_input_lengths: int32 [B, K]; not of an encoder-decoder.
        cum_log_probs: fp32 [B, K], and output_log_probs: fp32 [B, K, max request_output_len]: only where a row has
            is_return_log_probs; 0 in the others. With is_return_context_cum_log_probs the first begins with the
            log-probabilities (without temperature and penalty) of the input's tokens that have one. Of a beam
            they are those of its own tokens. (FasterTransformer does not follow a beam back in output_log_probs.)
        context_embeddings: fp32 [B, K, hidden]: only where a row has is_return_context_embeddings.
        context_log_probs: fp32 [B, L], and context_argmax_ids: uint32 [B, L]: only where a row has
            is_return_context_log_probs. Of each token of the input its log-probability (without temperature and
            penalty) after those before it, and the most probable token in its place. 0 for a row's first token (but
            a decoder's comes after start_id), for tokens of a conversation's earlier requests, in padding and in the
            other rows.
        output_hidden_state: fp32 [B, S, hidden], of an encoder without a decoder, which has none of the above. S is
            input_ids' width.
        output_attentions: fp32 [B, layers, heads, S, S], beside it where any row has is_return_attentions: how much of
            each key (last axis) each query takes; 0 in padding. (FasterTransformer leaves numbers without a meaning in
            the rows of queries that are padding.)
    """
    request = job.request
    if job.sequences[0].encoded is not None:
        width = request.source_width
        encoded = {"output_hidden_state": _stacked([each.encoded for each in job.sequences], (width, 0))}
        if request.wants("attentions"):
            rows = [each.attentions for each in job.sequences]
            encoded["output_attentions"] = _stacked(rows, (0, 0, width, width))
        return encoded
    width = request.beam_width
    ids = job.lay_out_ids()
    inputs = np.array([[len(sequence.shown)] * width for sequence in job.sequences], np.int32)
    lengths = inputs + np.array([[len(tokens) for tokens in sequence.tokens] for sequence in job.sequences], np.int32)
    tensors: dict[str, Array] = {
        "output_ids": ids,
        "sequence_length": lengths.astype(np.uint32),
        "response_input_lengths": inputs,
    }
    if request.sources:
        tensors = {"output_ids": ids.astype(np.int32), "sequence_length": lengths}
    if request.wants("log_probs"):
        tensors |= _token_scores(job)
    if request.wants("context_embeddings"):
        embeddings = _stacked([sequence.context_embedding for sequence in job.sequences])
        tensors["context_embeddings"] = np.repeat(embeddings[:, None], width, axis=1)
    if request.wants("context_log_probs"):
        tensors |= _context_scores(job.sequences, ids.shape[2] - int(request.output_lengths.max()))
    return tensors


def _token_scores(job: Job) -> dict[str, Array]:
    batch, width = job.request.batch_size, job.request.beam_width
    scores = np.zeros((batch, width), np.float32)
    log_probs = np.zeros((batch, width, int(job.request.output_lengths.max())), np.float32)
    for row, sequence in enumerate(job.sequences):
        if sequence.wants("log_probs"):
            scores[row] = sequence.scores
            for beam, gains in enumerate(sequence.log_probs):
                log_probs[row, beam, : len(gains)] = gains
    return {"cum_log_probs": scores, "output_log_probs": log_probs}


def _context_scores(sequences: list[Sequence], width: int) -> dict[str, Array]:
    log_probs, best = np.zeros((len(sequences), width), np.float32), np.zeros((len(sequences), width), np.uint32)
    for row, sequence in enumerate(sequences):
        if sequence.context_scores is not None and sequence.shown:
            count = min(len(sequence.shown), len(sequence.context_scores[0]))  # an empty input was a start_id
            place = slice(len(sequence.shown) - count, len(sequence.shown))
            log_probs[row, place], best[row, place] = (values[-count:] for values in sequence.context_scores)
    return {"context_log_probs": log_probs, "context_argmax_ids": best}


def _stacked(rows: list[Array | None], least: tuple[int, ...] = ()) -> Array:
    """Put arrays under each other, filled up with zeros to the longest, at least to ``least``; None is zeros."""
    sizes = [row.shape for row in rows if row is not None] + ([least] if least else [])
    shape = [max(axis) for axis in zip(*sizes, strict=True)] if sizes else [0]
    stacked = np.zeros((len(rows), *shape), np.float32)
    for target, row in zip(stacked, rows, strict=True):
        if row is not None:
            target[tuple(slice(size) for size in row.shape)] = row
    return stacked
