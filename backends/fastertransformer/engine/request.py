"""What a client asked for: named tensors, checked, as one row per sequence.

Names, types and shapes: FasterTransformer's GPT guide; ``min_length`` and ``presence_penalty``, which its Triton guide
leaves out, are in the table of ``ParallelGpt``'s inputs. Scalars come as [B, 1] from clients, or as [B] where the
config.pbtxt reshapes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import ModelConfig
from .errors import RequestError
from .prompts import PROMPT_NAMES, Context, PromptTables, place_prompts
from .words import WordList, parse_word_lists

Array = npt.NDArray[Any]

BEAM_WIDTH_LIMIT = 64  # FasterTransformer's kernels; see BeamSearch's docstring for the widths that its backend takes
NEVER = 0xFFFFFFFF  # a token that never comes


@dataclass(frozen=True)
class Scalar:
    """One value a row.

    Attributes:
        dtypes: numpy types that are accepted.
        default: of every row where the tensor is not sent; None: required, or from config.ini.
        low, high: inclusive bounds.
    """

    dtypes: tuple[type, ...]
    default: float | None
    low: float = -np.inf
    high: float = np.inf


_FLOAT, _UINT, _BOOL = (np.float32,), (np.uint32,), (np.bool_,)
_SMALLEST = float(np.finfo(np.float32).tiny)
SCALARS = {
    "input_lengths": Scalar(_UINT, None),
    "request_output_len": Scalar(_UINT, None),
    "beam_width": Scalar(_UINT, 1, high=BEAM_WIDTH_LIMIT),
    "runtime_top_k": Scalar(_UINT, 0),
    "runtime_top_p": Scalar(_FLOAT, 0.0, 0.0, 1.0),
    "top_p_decay": Scalar(_FLOAT, 1.0),
    "top_p_min": Scalar(_FLOAT, 1e-6),
    "top_p_reset_ids": Scalar(_UINT, NEVER),
    "temperature": Scalar(_FLOAT, 1.0, 0.0),
    "repetition_penalty": Scalar(_FLOAT, 1.0, _SMALLEST),
    "presence_penalty": Scalar(_FLOAT, 0.0),
    "len_penalty": Scalar(_FLOAT, 0.0),
    "beam_search_diversity_rate": Scalar(_FLOAT, 0.0),
    "min_length": Scalar((np.int32, np.uint32), 0),
    "random_seed": Scalar((np.uint64,), 0),
    "is_return_log_probs": Scalar(_BOOL, False),
    "is_return_context_cum_log_probs": Scalar(_BOOL, False),
    "is_return_context_embeddings": Scalar(_BOOL, False),
    "start_id": Scalar(_UINT, None),
    "end_id": Scalar(_UINT, None),
}
_REQUIRED = ("input_ids", "input_lengths", "request_output_len")
_WORD_LISTS = ("bad_words_list", "stop_words_list")
INPUT_NAMES = frozenset(("input_ids", *SCALARS, *_WORD_LISTS, *PROMPT_NAMES))


@dataclass(frozen=True)
class Request:
    """B sequences to continue.

    Attributes:
        input_ids: int64 [B, L], padded on the right: what the answer shows of the input, so without prompts.
        input_lengths: int64 [B], from 0 to L.
        output_lengths: int64 [B], tokens to generate at most.
        scalars: by FasterTransformer's name, [B] each; those that were not sent have its default.
        bad_words, stop_words: B lists: what must not come, and what ends a row when it has come.
        contexts: B: what each row's generation starts from, prompts included.
        beam_width: of every row; 1 is sampling.
    """

    input_ids: Array
    input_lengths: Array
    output_lengths: Array
    scalars: Mapping[str, Array]
    bad_words: Sequence[WordList]
    stop_words: Sequence[WordList]
    contexts: Sequence[Context]
    beam_width: int = 1

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self.output_lengths)

    def wants(self, name: str) -> bool:
        """Say whether any row has is_return_<name>."""
        return bool(self.scalars[f"is_return_{name}"].any())


def parse_request(tensors: Mapping[str, Array], config: ModelConfig, prompts: PromptTables | None = None) -> Request:
    """Check the tensors of one request.

    Args:
        tensors: by FasterTransformer's names; absent optional tensors take FasterTransformer's defaults: greedy,
            temperature 1, no penalty, seed 0, end_id and start_id of config.ini, no log-probabilities, no words.
        config: the model's dimensions.
        prompts: the checkpoint's prompt learning; None where it has none.

    Raises:
        RequestError: a tensor is unknown, missing, of another type or shape, out of range, or input plus output is
            longer than max_pos_seq_len. (FasterTransformer logs an error there and reads past the position table.)
    """
    _check_names(tensors)
    ids = _input_ids(tensors)
    batch = ids.shape[0]
    defaults = {"start_id": config.start_id, "end_id": config.end_id}
    scalars = {name: _scalar(tensors, name, rule, batch, defaults.get(name)) for name, rule in SCALARS.items()}
    for name, rule in SCALARS.items():
        _check_range(name, scalars[name], rule)
    _check_combinations(tensors, scalars)
    lengths = _input_lengths(ids, scalars["input_lengths"])
    contexts, shown = place_prompts(tensors, ids, lengths, scalars["start_id"], config, prompts)
    request = Request(
        input_ids=_padded(shown, ids.shape[1]),
        input_lengths=np.array([len(row) for row in shown], np.int64),
        output_lengths=scalars["request_output_len"].astype(np.int64),
        scalars=scalars,
        bad_words=_word_lists(tensors, "bad_words_list", batch),
        stop_words=_word_lists(tensors, "stop_words_list", batch),
        contexts=contexts,
        beam_width=max(1, int(scalars["beam_width"].max(initial=1))),
    )
    _check_lengths(request, config)
    return request


def _check_names(tensors: Mapping[str, Array]) -> None:
    for name, array in tensors.items():
        if name not in INPUT_NAMES:
            close = get_close_matches(name, INPUT_NAMES, n=1)
            hint = f", did you mean '{close[0]}'?" if close else f"; known are {', '.join(sorted(INPUT_NAMES))}"
            raise RequestError(f"unknown input '{name}' of shape {list(array.shape)}{hint}")
    missing = [name for name in _REQUIRED if name not in tensors]
    if missing:
        raise RequestError(f"missing input: {', '.join(missing)}")


def _input_ids(tensors: Mapping[str, Array]) -> Array:
    ids = tensors["input_ids"]
    if ids.dtype != np.uint32:
        raise RequestError(f"input_ids has type {ids.dtype.name}, expected uint32")
    if ids.ndim != 2 or not ids.shape[0]:
        raise RequestError(f"input_ids has shape {list(ids.shape)}, expected [batch, n]")
    return ids.astype(np.int64)


def _scalar(tensors: Mapping[str, Array], name: str, rule: Scalar, batch: int, default: float | None) -> Array:
    """One value a row, [B] or [B, 1] -> [B]; the default where it is not sent."""
    if name not in tensors:
        value = rule.default if default is None else default
        assert value is not None  # required tensors are checked by name first
        return np.full(batch, value, rule.dtypes[0])
    array = tensors[name]
    if array.dtype not in rule.dtypes:
        expected = " or ".join(np.dtype(dtype).name for dtype in rule.dtypes)
        raise RequestError(f"{name} has type {array.dtype.name}, expected {expected}")
    if array.shape not in ((batch,), (batch, 1)):
        raise RequestError(f"{name} has shape {list(array.shape)}, expected [{batch}, 1]")
    return array.reshape(batch)


def _check_range(name: str, values: Array, rule: Scalar) -> None:
    if values.dtype.kind == "f":
        bounds = f"a number from {rule.low:g} to {rule.high:g}"
        refuse_rows(name, values, ~(np.isfinite(values) & (values >= rule.low) & (values <= rule.high)), bounds)
    elif rule.high < np.inf:
        refuse_rows(name, values, values > rule.high, f"at most {rule.high:g}")


def _check_combinations(tensors: Mapping[str, Array], scalars: Mapping[str, Array]) -> None:
    scope = scalars["is_return_context_cum_log_probs"]
    lacks = scope & ~scalars["is_return_log_probs"]
    refuse_rows("is_return_context_cum_log_probs", scope, lacks, "false without is_return_log_probs")
    if "repetition_penalty" in tensors and "presence_penalty" in tensors:
        raise RequestError("repetition_penalty and presence_penalty exclude each other; send one of them")
    width = np.maximum(scalars["beam_width"], 1)
    refuse_rows("beam_width", width, width != width[0], f"the same in all rows of a request, {width[0]} as in row 0")


def _input_lengths(ids: Array, lengths: Array) -> Array:
    width = ids.shape[1]
    if width:
        refuse_rows("input_lengths", lengths, (lengths < 1) | (lengths > width), f"1 to {width}, input_ids' width")
    return lengths.astype(np.int64) if width else np.zeros(len(lengths), np.int64)


def _padded(rows: Sequence[Array], most: int) -> Array:
    """Rows under each other: as wide as the input that was sent, or narrower by the prompts in it."""
    width = max(map(len, rows)) if any(len(row) < most for row in rows) else most
    ids = np.zeros((len(rows), width), np.int64)
    for row, line in enumerate(rows):
        ids[row, : len(line)] = line
    return ids


def _word_lists(tensors: Mapping[str, Array], name: str, batch: int) -> list[WordList]:
    if name not in tensors:
        return [WordList()] * batch
    if tensors[name].dtype != np.int32:
        raise RequestError(f"{name} has type {tensors[name].dtype.name}, expected int32")
    return parse_word_lists(name, tensors[name], batch)


def _check_lengths(request: Request, config: ModelConfig) -> None:
    total = np.array([len(context.ids) for context in request.contexts]) + request.output_lengths
    row = int(total.argmax())
    if total[row] > config.max_pos_seq_len:
        raise RequestError(
            f"input_lengths {len(request.contexts[row].ids)} + request_output_len {request.output_lengths[row]}"
            f" = {total[row]} in row {row} exceeds max_pos_seq_len {config.max_pos_seq_len}"
        )


def refuse_rows(name: str, values: Array, is_bad: Array, rule: str) -> None:
    """Refuse a tensor for the first row that breaks a rule."""
    if is_bad.any():
        row = int(is_bad.argmax())
        raise RequestError(f"{name} is {values[row]} in row {row}; it must be {rule}")
