"""What comes back: the tensors of an answer, named and shaped as in FasterTransformer backend's guides, by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from tritonclient import grpc as triton

from evaluation.client.request_tensors import IdsRequest
from handover.errors import ServerError


@dataclass(frozen=True)
class Completion:
    """What an ensemble gave back for one text.

    Attributes:
        text: the prompt and what follows it, or what an encoder-decoder wrote.
        length: tokens of prompt and answer, or of the answer of an encoder-decoder; None if the model does not say.
        scores: what was asked for beside the text; its tokens are not known here, so they are empty.
    """

    text: str
    length: int | None
    scores: Generation


@dataclass(frozen=True)
class Generation:
    """What was generated for one row.

    Attributes:
        tokens: generated token ids, the end token included where it came.
        cum_log_prob: sum of the natural log probabilities of the generated tokens and, if it was asked
            for, of the prompt's tokens but the first; None if not asked for.
        log_probs: of each generated token, with top_k among the top k only; None if not asked for.
        prompt_log_probs: of each of the prompt's tokens but the first or, of an encoder-decoder, of those that its
            decoder began with; None if not asked for or not known.
        prompt_argmax: the most probable token in each of these places; likewise.
    """

    tokens: tuple[int, ...]
    cum_log_prob: float | None = None
    log_probs: tuple[float, ...] | None = None
    prompt_log_probs: tuple[float, ...] | None = None
    prompt_argmax: tuple[int, ...] | None = None


def read_completions(rows: int, answer: triton.InferResult, is_encoder_decoder: bool = False) -> list[Completion]:
    """Take the texts out of an ensemble's answer, with what else it says of each row.

    Args:
        rows: that were sent.
        answer: to them.
        is_encoder_decoder: the ensemble is one around a T5.

    Raises:
        ServerError: it has another number of texts.
    """
    texts, lengths = answer.as_numpy("OUTPUT_0"), answer.as_numpy("sequence_length")
    if texts is None or texts.size != rows:
        raise ServerError(f"the answer to {rows} prompts has {0 if texts is None else texts.size} texts")
    arrays = _score_arrays(answer)
    return [
        Completion(
            text.decode(errors="replace"),
            None if lengths is None else int(lengths[row].reshape(-1)[0]),
            _scores(arrays, row, first=int(not is_encoder_decoder)),
        )
        for row, text in enumerate(texts.reshape(-1))
    ]


def read_generations(request: IdsRequest, answer: triton.InferResult) -> list[Generation]:
    """Take the generated part out of an answer, and prove that it continues what it should.

    ``output_ids`` is [rows, beams, longest input + longest output] and ``sequence_length`` [rows, beams];
    generated tokens follow directly after each row's own input. The first beam is read. Our engine counts
    ``sequence_length`` from a row's own input, FasterTransformer from the longest input of the batch; both
    are understood. Of an encoder-decoder both hold the decoder's tokens alone.

    Raises:
        ServerError: a tensor is missing or misshapen, or a row does not begin with its prompt.
    """
    ids, lengths = answer.as_numpy("output_ids"), answer.as_numpy("sequence_length")
    rows = len(request.shown)
    if ids is None or lengths is None or ids.ndim != 3 or ids.shape[0] != rows or lengths.shape[:1] != (rows,):
        raise ServerError(f"the answer to {rows} prompts has no fitting output_ids and sequence_length")
    arrays, generations = _score_arrays(answer), []
    longest, first = max(map(len, request.shown)), int(not request.is_encoder_decoder)
    for row, (shown, wanted) in enumerate(zip(request.shown, request.output_lengths, strict=True)):
        length = int(lengths[row].reshape(-1)[0])
        count = length - len(shown)
        if shown and length - longest == wanted:
            count = wanted
        sequence = tuple(int(token) for token in ids[row, 0, : len(shown) + count])
        if sequence[: len(shown)] != shown or not 0 <= count <= wanted:
            raise ServerError(f"row {row} of the answer does not continue its prompt of {len(shown)} tokens")
        tokens = sequence[len(shown) :]
        generations.append(_scores(arrays, row, tokens, len(tokens), len(shown), first))
    return generations


def _score_arrays(answer: triton.InferResult) -> list[npt.NDArray[Any] | None]:
    names = ("cum_log_probs", "output_log_probs", "context_log_probs", "context_argmax_ids")
    return [answer.as_numpy(name) for name in names]


def _scores(
    arrays: Sequence[npt.NDArray[Any] | None],
    row: int,
    tokens: tuple[int, ...] = (),
    generated: int | None = None,
    given: int | None = None,
    first: int = 1,
) -> Generation:
    """Read what was asked for beside the tokens of a row.

    Args:
        arrays: see _score_arrays.
        row: which.
        tokens: generated.
        generated: how many were; None: all that there are.
        given: how many came before them; None: likewise.
        first: of these that has a log probability.
    """
    cum_log_probs, log_probs, scores, best = arrays
    return Generation(
        tokens,
        None if cum_log_probs is None else float(cum_log_probs[row].reshape(-1)[0]),
        None if log_probs is None else tuple(map(float, log_probs[row, 0, :generated])),
        None if scores is None else tuple(map(float, scores[row, first:given])),
        None if best is None else tuple(map(int, best[row, first:given])),
    )
