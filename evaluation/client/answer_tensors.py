"""The tensors of an answer, read row by row; names and shapes are those of FasterTransformer backend's guides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from tritonclient import grpc as triton

from evaluation.client.request_tensors import IdsRequest
from handover.errors import ServerError


@dataclass(frozen=True)
class Completion:
    """An ensemble's answer to one text.

    Attributes:
        text: the prompt and its completion; of an encoder-decoder, the completion alone.
        length: tokens of prompt and completion or, of an encoder-decoder, of the completion; None if the model does not
            return it.
        scores: the requested log probabilities; ``tokens`` is empty, because a text model does not return token ids.
    """

    text: str
    length: int | None
    scores: Generation


@dataclass(frozen=True)
class Generation:
    """The generated tokens of one row, with the requested log probabilities.

    Attributes:
        tokens: generated token ids, with the end token if one was generated.
        cum_log_prob: sum of the natural log probabilities of the generated tokens and, if requested, of the prompt's
            tokens but the first; None if not requested.
        log_probs: natural log probability of each generated token, with top_k among the top k only; None if not
            requested.
        prompt_log_probs: natural log probability of each prompt token but the first or, of an encoder-decoder, of each
            token of the decoder's input; None if not requested or not returned.
        prompt_argmax: argmax at each of these positions; None as for ``prompt_log_probs``.
        prompt_top: log probabilities of the most probable tokens at each of these positions; None if not requested.
    """

    tokens: tuple[int, ...]
    cum_log_prob: float | None = None
    log_probs: tuple[float, ...] | None = None
    prompt_log_probs: tuple[float, ...] | None = None
    prompt_argmax: tuple[int, ...] | None = None
    prompt_top: tuple[Mapping[int, float], ...] | None = None


def read_completions(rows: int, answer: triton.InferResult, is_encoder_decoder: bool = False) -> list[Completion]:
    """Read the texts of an ensemble's answer to a number of rows, with the requested log probabilities of each.

    Raises:
        ServerError: the answer has another number of texts.
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
    """Read the generated tokens of an answer, and check that each row continues its prompt.

    ``output_ids`` is [rows, beams, longest input + longest output] and ``sequence_length`` [rows, beams];
    generated tokens follow directly after each row's own input. Only the first beam is read. The drop-in engine counts
    ``sequence_length`` from the row's own input, FasterTransformer from the longest input of the batch; both are read
    correctly. For an encoder-decoder both tensors hold the decoder's tokens alone.

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


_TOP = ("context_top_ids", "context_top_log_probs")


def _score_arrays(answer: triton.InferResult) -> list[npt.NDArray[Any] | None]:
    names = ("cum_log_probs", "output_log_probs", "context_log_probs", "context_argmax_ids", *_TOP)
    return [answer.as_numpy(name) for name in names]


def _scores(
    arrays: Sequence[npt.NDArray[Any] | None],
    row: int,
    tokens: tuple[int, ...] = (),
    generated: int | None = None,
    given: int | None = None,
    first: int = 1,
) -> Generation:
    """Read the requested log probabilities of a row.

    Args:
        arrays: the tensors that ``_score_arrays`` returns.
        row: index of the row.
        tokens: generated token ids.
        generated: number of generated tokens; None for the whole length of the tensor.
        given: number of tokens before the generated ones; None for the whole length of the tensor.
        first: index of the first of these that has a log probability.
    """
    cum_log_probs, log_probs, scores, best, top_ids, top = arrays
    places = range(first, scores.shape[1] if given is None else given) if scores is not None else range(0)
    return Generation(
        tokens,
        None if cum_log_probs is None else float(cum_log_probs[row].reshape(-1)[0]),
        None if log_probs is None else tuple(map(float, log_probs[row, 0, :generated])),
        None if scores is None else tuple(map(float, scores[row, first:given])),
        None if best is None else tuple(map(int, best[row, first:given])),
        None
        if top_ids is None or top is None
        else tuple(dict(zip(map(int, top_ids[row, at]), map(float, top[row, at]), strict=True)) for at in places),
    )
