"""Checks a request's tensors against what ``ft_format/tensors.py`` says of each: type, shape, range and default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest

import numpy as np

from ft_format.tensors import CONTROLS, DECODERS, INPUTS, REQUIRED, TEXT, names_of
from models.checks import Range

from ..arrays import Array
from ..errors import RequestError


@dataclass(frozen=True)
class Scalar:
    """One value a row, in a range, of one of these numpy types.

    ``default`` is that of every row where the tensor is not sent; None: it is required, or from config.ini.
    """

    dtypes: tuple[type, ...]
    default: float | None
    legal: Range = Range()

    def read(self, name: str, array: Array, batch: int) -> Array:
        """Check a tensor, [B] or [B, 1] -> [B]."""
        dtype = array.dtype
        if batch == array.size == 1 and array.ndim in (1, 2) and dtype.isnative and dtype.type in self.dtypes:
            value = array.item()  # of one row, as most requests are, numpy would take ten times as long
            if value in self.legal and math.isfinite(value):
                return array.reshape(1)
        values = checked(name, array[:, None] if array.ndim == 1 else array, self.dtypes, batch, 1)[:, 0]
        least, most = self.legal.least, self.legal.most
        if values.dtype.kind == "f":
            is_legal = np.isfinite(values) & (values >= least) & (values <= most)
            refuse_rows(name, values, ~is_legal, f"a number from {least:g} to {most:g}")
        else:
            refuse_rows(name, values, values > most, f"at most {most:g}")
            refuse_rows(name, values, values < least, f"at least {least:g}")
        return values


def checked(name: str, array: Array, dtypes: tuple[type, ...], *shape: int | str) -> Array:
    """Return the tensor; refuse it if it has none of these types, or another shape: a string in it means any size."""
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


SCALARS = {
    name: Scalar(tuple(np.dtype(kind).type for kind in (each.kind, *each.older_kinds)), each.default, each.legal)
    for name, each in INPUTS.items()
    if not each.shape and each.kind != TEXT and each not in (*REQUIRED, *CONTROLS)
}
"""Inputs of one value a row that may be left out."""
_REQUIRED = Scalar((np.uint32,), None)
GUIDES = ("guided_decoding_guide_type", "guided_decoding_guide")


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


def texts(name: str, sent: Inputs) -> list[str]:
    """Return a text of each row."""
    array = sent.tensors[name]
    values = checked(name, array[:, None] if array.ndim == 1 else array, (np.object_,), sent.batch, 1)[:, 0]
    return [_text(name, row, value) for row, value in enumerate(values.tolist())]


def _text(name: str, row: int, value: str | bytes) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is no UTF-8 in row {row}, byte {error.start}") from None


@dataclass(frozen=True)
class InputSchema:
    """The names of a family's inputs."""

    lengths: str  # of the inputs
    output: str  # the most tokens to generate; empty: nothing is generated
    names: frozenset[str]  # of all inputs; scalars that are not among them have their defaults

    @cached_property
    def scalars(self) -> dict[str, Scalar]:
        """All inputs of one value a row."""
        return {**dict.fromkeys(filter(None, (self.lengths, self.output)), _REQUIRED), **SCALARS}

    def defaults(self, batch: int, **own: float) -> Mapping[str, Array]:
        """Return what every row has where a tensor is not sent, [B] each; ``own`` defaults take the scalars' place."""
        return _defaults(self, batch, *own.items())


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


INPUT_SCHEMAS = {
    **{name: InputSchema("input_lengths", "request_output_len", names_of(name)) for name in sorted(DECODERS)},
    "t5": InputSchema("sequence_length", "max_output_len", names_of("t5")),
    "t5-encoder": InputSchema("sequence_length", "", names_of("t5-encoder")),
}
