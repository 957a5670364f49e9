"""What a client asked for: named tensors, checked, as one row per sequence.

Names, types and shapes: FasterTransformer's GPT guide. Scalars come as [B, 1] from clients, or as [B] where the
config.pbtxt reshapes them. What is not honoured is refused by name unless its value changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import GptConfig
from .errors import RequestError
from .words import WordList, parse_word_lists

Array = npt.NDArray[Any]

# name: (type, value of every row where the tensor is not sent; None: required or from config.ini)
_SCALARS: dict[str, tuple[type, float | None]] = {
    "input_lengths": (np.uint32, None),
    "request_output_len": (np.uint32, None),
    "runtime_top_k": (np.uint32, 0),
    "runtime_top_p": (np.float32, 0.0),
    "temperature": (np.float32, 1.0),
    "repetition_penalty": (np.float32, 1.0),
    "random_seed": (np.uint64, 0),
    "is_return_log_probs": (np.bool_, False),
    "is_return_context_cum_log_probs": (np.bool_, False),
    "start_id": (np.uint32, None),
    "end_id": (np.uint32, None),
}
_REQUIRED = ("input_ids", "input_lengths", "request_output_len")


@dataclass(frozen=True)
class Unhonoured:
    """An input that FasterTransformer knows and this engine does not honour yet.

    Attributes:
        dtype: numpy type; None for any float type.
        rank: axes behind the batch axis; 0 for a scalar.
        neutral: says whether a value asks for nothing.
        advice: which values are accepted.
    """

    dtype: type | None
    rank: int
    neutral: Callable[[Array], bool]
    advice: str


def _only(*values: float) -> Callable[[Array], bool]:
    return lambda array: bool(np.isin(array, np.asarray(values, array.dtype)).all())


UNHONOURED: dict[str, Unhonoured] = {
    "beam_width": Unhonoured(np.uint32, 0, _only(0, 1), "only 1"),
    "beam_search_diversity_rate": Unhonoured(np.float32, 0, _only(0.0), "only 0"),
    "len_penalty": Unhonoured(np.float32, 0, _only(0.0, 1.0), "only 0 or 1"),
    "is_return_context_embeddings": Unhonoured(np.bool_, 0, _only(False), "only false"),
    "prompt_learning_task_name_ids": Unhonoured(np.uint32, 0, lambda array: False, "leave it out"),
    "request_prompt_embedding": Unhonoured(None, 2, lambda array: array.size == 0, "leave it out"),
    "request_prompt_lengths": Unhonoured(np.uint32, 0, _only(0), "only 0"),
    "request_prompt_type": Unhonoured(np.uint32, 0, _only(0), "only 0"),
    "top_p_decay": Unhonoured(np.float32, 0, _only(1.0), "only 1"),
    "top_p_min": Unhonoured(np.float32, 0, _only(0.0, 1e-6), "only 0 or 1e-6"),
    "top_p_reset_ids": Unhonoured(np.uint32, 0, _only(0, 0xFFFFFFFF), "only 0 or 4294967295"),
}
_WORD_LISTS = ("bad_words_list", "stop_words_list")
INPUT_NAMES = frozenset(("input_ids", *_SCALARS, *_WORD_LISTS, *UNHONOURED))


@dataclass(frozen=True)
class Request:
    """B sequences to continue, a value of each row in every field.

    Attributes:
        input_ids: int64 [B, L], padded on the right.
        input_lengths: int64 [B], from 1 to L.
        output_lengths: int64 [B], tokens to generate at most.
        top_k, top_p, temperature, repetition_penalty: as sent, [B].
        random_seed: uint64 [B].
        end_id: int64 [B].
        wants_log_probs: bool [B].
        wants_context_log_probs: bool [B]: cum_log_probs starts with the input's own log-probabilities.
        bad_words, stop_words: B lists: what must not come, and what ends a row when it has come.
        hides_input: the input was empty and input_ids holds the start token, which the output leaves out.
    """

    input_ids: Array
    input_lengths: Array
    output_lengths: Array
    top_k: Array
    top_p: Array
    temperature: Array
    repetition_penalty: Array
    random_seed: Array
    end_id: Array
    wants_log_probs: Array
    wants_context_log_probs: Array
    bad_words: Sequence[WordList]
    stop_words: Sequence[WordList]
    hides_input: bool = False

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self.input_lengths)


def parse_request(tensors: Mapping[str, Array], config: GptConfig) -> Request:
    """Check the tensors of one request.

    Args:
        tensors: by FasterTransformer's names; absent optional tensors take FasterTransformer's defaults: greedy,
            temperature 1, no penalty, seed 0, end_id and start_id of config.ini, no log-probabilities, no words.
        config: the model's dimensions.

    Raises:
        RequestError: a tensor is unknown, missing, of another type or shape, out of range, not honoured, or input plus
            output is longer than max_pos_seq_len. (FasterTransformer logs an error there and reads past the position
            table.)
    """
    _check_names(tensors)
    ids = _tensor(tensors, "input_ids", np.uint32, rank=1)
    batch, width = ids.shape
    if batch == 0:
        raise RequestError("input_ids has no rows")
    for name, rule in UNHONOURED.items():
        if name in tensors:
            _refuse_unless_neutral(tensors, name, rule, batch)
    values = {name: _scalar(tensors, name, batch) for name in _SCALARS}
    start_id = _or_default(values["start_id"], config.start_id, batch)
    lengths = values["input_lengths"]
    hides_input = width == 0
    if hides_input:  # nothing to continue: FasterTransformer starts from start_id and leaves it out of the output
        ids, lengths = start_id[:, None], np.ones(batch, np.int64)
    request = Request(
        input_ids=ids.astype(np.int64),
        input_lengths=_present(lengths).astype(np.int64),
        output_lengths=_present(values["request_output_len"]).astype(np.int64),
        top_k=_present(values["runtime_top_k"]).astype(np.int64),
        top_p=_present(values["runtime_top_p"]),
        temperature=_present(values["temperature"]),
        repetition_penalty=_present(values["repetition_penalty"]),
        random_seed=_present(values["random_seed"]),
        end_id=_or_default(values["end_id"], config.end_id, batch),
        wants_log_probs=_present(values["is_return_log_probs"]),
        wants_context_log_probs=_present(values["is_return_context_cum_log_probs"]),
        bad_words=_word_lists(tensors, "bad_words_list", batch),
        stop_words=_word_lists(tensors, "stop_words_list", batch),
        hides_input=hides_input,
    )
    _check_ranges(request, config)
    return request


def _check_names(tensors: Mapping[str, Array]) -> None:
    for name in tensors:
        if name not in INPUT_NAMES:
            close = get_close_matches(name, INPUT_NAMES, n=1)
            raise RequestError(f"unknown input '{name}'" + (f", did you mean '{close[0]}'?" if close else ""))
    missing = [name for name in _REQUIRED if name not in tensors]
    if missing:
        raise RequestError(f"missing input: {', '.join(missing)}")


def _tensor(tensors: Mapping[str, Array], name: str, dtype: type | None, rank: int) -> Array:
    """Check type and number of axes: rank axes behind the batch axis."""
    array = tensors[name]
    fits = np.issubdtype(array.dtype, np.floating) if dtype is None else array.dtype == dtype
    if not fits:
        expected = "a float type" if dtype is None else np.dtype(dtype).name
        raise RequestError(f"{name} has type {array.dtype.name}, expected {expected}")
    if array.ndim != rank + 1:
        axes = ", ".join(["batch", "n", "n"][: rank + 1])
        raise RequestError(f"{name} has shape {list(array.shape)}, expected [{axes}]")
    return array


def _scalar(tensors: Mapping[str, Array], name: str, batch: int, dtype: type | None = None) -> Array | None:
    """One value a row, [B] or [B, 1] -> [B]; the default where it is not sent."""
    known_dtype, default = _SCALARS.get(name, (dtype, None))
    if name not in tensors:
        return None if default is None else np.full(batch, default, known_dtype)
    array = tensors[name]
    if array.dtype != known_dtype:
        raise RequestError(f"{name} has type {array.dtype.name}, expected {np.dtype(known_dtype).name}")
    if array.shape not in ((batch,), (batch, 1)):
        raise RequestError(f"{name} has shape {list(array.shape)}, expected [{batch}, 1]")
    return array.reshape(batch)


def _refuse_unless_neutral(tensors: Mapping[str, Array], name: str, rule: Unhonoured, batch: int) -> None:
    if rule.rank == 0:
        array = _scalar(tensors, name, batch, rule.dtype)
        assert array is not None  # it is among the tensors
    else:
        array = _tensor(tensors, name, rule.dtype, rule.rank)
        if array.shape[0] != batch:
            raise RequestError(f"{name} has shape {list(array.shape)}, expected [{batch}, n, n]")
    if not rule.neutral(array):
        raise RequestError(f"{name} is not supported by this engine yet ({rule.advice})")


def _word_lists(tensors: Mapping[str, Array], name: str, batch: int) -> list[WordList]:
    if name not in tensors:
        return [WordList()] * batch
    if tensors[name].dtype != np.int32:
        raise RequestError(f"{name} has type {tensors[name].dtype.name}, expected int32")
    return parse_word_lists(name, tensors[name], batch)


def _present(array: Array | None) -> Array:
    assert array is not None  # required tensors are checked by name first, the others have a default
    return array


def _or_default(array: Array | None, default: int, batch: int) -> Array:
    return np.full(batch, default, np.int64) if array is None else array.astype(np.int64)


def _check_ranges(request: Request, config: GptConfig) -> None:
    width = request.input_ids.shape[1]
    bad = (request.input_lengths < 1) | (request.input_lengths > width)
    _refuse_rows("input_lengths", request.input_lengths, bad, f"must be 1 to {width}, the width of input_ids")
    is_real = np.arange(width) < request.input_lengths[:, None]
    bad_ids = request.input_ids[is_real & (request.input_ids >= config.vocab_size)]
    if bad_ids.size:
        raise RequestError(f"input_ids holds {bad_ids[0]}; the vocabulary has {config.vocab_size} tokens")
    total = request.input_lengths + request.output_lengths
    row = int(total.argmax())
    if total[row] > config.max_pos_seq_len:
        raise RequestError(
            f"input_lengths {request.input_lengths[row]} + request_output_len {request.output_lengths[row]}"
            f" = {total[row]} in row {row} exceeds max_pos_seq_len {config.max_pos_seq_len}"
        )
    top_p = request.top_p
    _refuse_rows("runtime_top_p", top_p, ~((top_p >= 0) & (top_p <= 1)), "must be 0 to 1")
    heat, penalty = request.temperature, request.repetition_penalty
    _refuse_rows("temperature", heat, ~((heat >= 0) & np.isfinite(heat)), "must be a number of at least 0")
    _refuse_rows("repetition_penalty", penalty, ~((penalty > 0) & np.isfinite(penalty)), "must be a positive number")
    scope = request.wants_context_log_probs
    _refuse_rows(
        "is_return_context_cum_log_probs", scope, scope & ~request.wants_log_probs, "needs is_return_log_probs"
    )


def _refuse_rows(name: str, values: Array, is_bad: Array, rule: str) -> None:
    if is_bad.any():
        row = int(is_bad.argmax())
        raise RequestError(f"{name} is {values[row]} in row {row}; it {rule}")


def join_requests(requests: Sequence[Request], pad_id: int = 0) -> Request:
    """Put the rows of several requests under each other, padding input_ids to the longest input.

    Args:
        requests: at least one.
        pad_id: fills what is behind a row's input; any legal token.
    """
    width = max(int(request.input_lengths.max()) for request in requests)
    ids = np.full((sum(request.batch_size for request in requests), width), pad_id, np.int64)
    row = 0
    for request in requests:
        for source, length in zip(request.input_ids, request.input_lengths, strict=True):
            ids[row, :length] = source[:length]
            row += 1

    def rows(field: str) -> Array:
        return np.concatenate([getattr(request, field) for request in requests])

    return Request(
        input_ids=ids,
        input_lengths=rows("input_lengths"),
        output_lengths=rows("output_lengths"),
        top_k=rows("top_k"),
        top_p=rows("top_p"),
        temperature=rows("temperature"),
        repetition_penalty=rows("repetition_penalty"),
        random_seed=rows("random_seed"),
        end_id=rows("end_id"),
        wants_log_probs=rows("wants_log_probs"),
        wants_context_log_probs=rows("wants_context_log_probs"),
        bad_words=[words for request in requests for words in request.bad_words],
        stop_words=[words for request in requests for words in request.stop_words],
    )
