"""Which input tensors each family of models has, and what they may hold.

Names, types and shapes: FasterTransformer's GPT and T5 guides; ``min_length`` and ``presence_penalty``, which its
Triton guides leave out, are in the tables of ``ParallelGpt``'s and ``T5Decoding``'s inputs.
This engine's own are ``is_return_context_log_probs``, T5's ``decoder_input_ids``, and what the OpenAI API has beyond
FasterTransformer (from ``frequency_penalty`` on, and the guides); docs/tensors.md says where each name comes from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest

import numpy as np

from ..arrays import Array
from ..errors import RequestError

BEAM_WIDTH_LIMIT = 64  # FasterTransformer's kernels; see sampling/beam.py for the widths that its backend takes
NEVER = 0xFFFFFFFF  # a token that never comes
MOST_TOP_LOG_PROBS = 20  # as in the OpenAI API


@dataclass(frozen=True)
class Scalar:
    """One value a row, from ``low`` to ``high``, of one of these numpy types.

    ``default`` is that of every row where the tensor is not sent; None: it is required, or from config.ini.
    """

    dtypes: tuple[type, ...]
    default: float | None
    low: float = -np.inf
    high: float = np.inf

    def read(self, name: str, array: Array, batch: int) -> Array:
        """Check a tensor, [B] or [B, 1] -> [B]."""
        dtype = array.dtype
        if batch == array.size == 1 and array.ndim in (1, 2) and dtype.isnative and dtype.type in self.dtypes:
            value = array.item()  # of one row, as most requests are, numpy would take ten times as long
            if self.low <= value <= self.high and math.isfinite(value):
                return array.reshape(1)
        values = checked(name, array[:, None] if array.ndim == 1 else array, self.dtypes, batch, 1)[:, 0]
        if values.dtype.kind == "f":
            is_legal = np.isfinite(values) & (values >= self.low) & (values <= self.high)
            refuse_rows(name, values, ~is_legal, f"a number from {self.low:g} to {self.high:g}")
        else:
            refuse_rows(name, values, values > self.high, f"at most {self.high:g}")
            refuse_rows(name, values, values < self.low, f"at least {self.low:g}")
        return values


def checked(name: str, array: Array, dtypes: tuple[type, ...], *shape: int | str) -> Array:
    """Give the tensor, or refuse it if it has none of these types, or another shape; a string in it means any size."""
    if array.dtype not in dtypes:
        expected = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise RequestError(f"{name} has type {array.dtype.name}, expected {expected}")
    legal = tuple(mine if isinstance(size, str) else size for size, mine in zip_longest(shape, array.shape))
    if array.shape != legal:
        rows = f", as input_ids has {shape[0]} rows" if array.shape[:1] != legal[:1] else ""
        raise RequestError(f"{name} has shape {list(array.shape)}, expected [{', '.join(map(str, shape))}]{rows}")
    return array


def refuse_rows(name: str, values: Array, is_bad: Array, rule: str) -> None:
    """Refuse a tensor for the first row that breaks a rule."""
    if is_bad.any():
        row = int(is_bad.argmax())
        raise RequestError(f"{name} is {values[row]} in row {row}; it must be {rule}")


_FLOAT, _UINT, _BOOL = (np.float32,), (np.uint32,), (np.bool_,)
_SMALLEST = float(np.finfo(np.float32).tiny)
_REQUIRED = Scalar(_UINT, None)
_WISHES = (
    "log_probs",
    "context_cum_log_probs",
    "context_log_probs",
    "context_embeddings",
    "attentions",
    "raw_log_probs",
)
SCALARS = {
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
    "min_length": Scalar((np.int32, np.uint32), 0, low=0),
    "random_seed": Scalar((np.uint64, np.int32), 0),  # int32: stores and clients of FasterTransformer 1.x
    "session_len": Scalar(_UINT, 0),
    "memory_len": Scalar(_UINT, 0),
    "prompt_learning_task_name_ids": Scalar(_UINT, 0),
    "request_prompt_lengths": Scalar(_UINT, 0),
    "request_prompt_type": Scalar(_UINT, 0),
    "ia3_tasks": Scalar((np.int32,), -1),
    "decoder_input_lengths": Scalar(_UINT, 0),
    "start_id": Scalar(_UINT, None),
    "end_id": Scalar(_UINT, None),
    "frequency_penalty": Scalar(_FLOAT, 0.0),
    "output_presence_penalty": Scalar(_FLOAT, 0.0),
    "min_p": Scalar(_FLOAT, 0.0, 0.0, 1.0),
    "ignore_eos": Scalar(_BOOL, False),
    "num_top_log_probs": Scalar(_UINT, 0, high=MOST_TOP_LOG_PROBS),
    "num_context_top_log_probs": Scalar(_UINT, 0, high=MOST_TOP_LOG_PROBS),
    **{f"is_return_{wish}": Scalar(_BOOL, False) for wish in _WISHES},
}
_TOKEN_LISTS = ("logit_bias_ids", "logit_bias_values", "stop_token_ids")
GUIDES = ("guided_decoding_guide_type", "guided_decoding_guide")
_LISTS = ("bad_words_list", "stop_words_list", "request_prompt_embedding", "decoder_input_ids", *_TOKEN_LISTS, *GUIDES)
_CONTROLS = ("START", "END")  # of Triton's sequence batcher


@dataclass(frozen=True)
class Inputs:
    """A request's tensors."""

    tensors: Mapping[str, Array]  # as they were sent, by name
    scalars: Mapping[str, Array]  # [B] each, checked; what was not sent has its default
    ids: Array  # input_ids, int64 [B, L]
    lengths: Array  # of the rows of ids, [B]
    limits: Array  # the most tokens to generate, [B]

    @property
    def batch(self) -> int:
        """The number of rows."""
        return len(self.ids)


@dataclass(frozen=True)
class InputSchema:
    """The names of a family's inputs."""

    lengths: str  # of the inputs
    output: str  # the most tokens to generate; empty: nothing is generated
    absent: frozenset[str]  # what cannot be sent; such scalars have their defaults

    @cached_property
    def scalars(self) -> dict[str, Scalar]:
        """All inputs of one value a row."""
        return {**dict.fromkeys(filter(None, (self.lengths, self.output)), _REQUIRED), **SCALARS}

    def defaults(self, batch: int, **own: float) -> Mapping[str, Array]:
        """Give what every row has where a tensor is not sent, [B] each; ``own`` defaults take the scalars' place."""
        return _defaults(self, batch, *own.items())

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all inputs."""
        return frozenset(("input_ids", *self.scalars, *_LISTS, *_CONTROLS)) - self.absent


@lru_cache(maxsize=256)  # most tensors of a request are not sent
def _defaults(schema: InputSchema, batch: int, *own: tuple[str, float]) -> Mapping[str, Array]:
    values = {name: rule.default for name, rule in schema.scalars.items()} | dict(own)
    found: dict[str, Array] = {
        name: np.full(batch, value, schema.scalars[name].dtypes[0])
        for name, value in values.items()
        if value is not None  # required
    }
    for array in found.values():
        array.flags.writeable = False
    return found


_ENCODERS = frozenset(("ia3_tasks", "is_return_attentions"))  # the latter of an encoder alone
_T5_ONLY = _ENCODERS | {"decoder_input_ids", "decoder_input_lengths"}
_GPT_ONLY = frozenset(("is_return_context_embeddings", "session_len", "memory_len", *_CONTROLS))
_GPT = InputSchema("input_lengths", "request_output_len", absent=_T5_ONLY)
_T5 = InputSchema("sequence_length", "max_output_len", absent=_GPT_ONLY | {"is_return_attentions"})
_ENCODER = InputSchema("sequence_length", "", absent=frozenset((*SCALARS, *_LISTS, *_CONTROLS)) - _ENCODERS)
INPUT_SCHEMAS = {"gpt": _GPT, "gptj": _GPT, "gptneox": _GPT, "llama": _GPT, "t5": _T5, "t5-encoder": _ENCODER}
