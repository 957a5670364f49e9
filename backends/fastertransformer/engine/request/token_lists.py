"""Ragged lists of tokens, one a row: the biases of logits, and the tokens that end a row beside its end_id.

Each is int32 [B, n], padded with -1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..arrays import Array
from ..errors import RequestError
from .schema import Inputs, checked

_IDS, _VALUES, _STOP = "logit_bias_ids", "logit_bias_values", "stop_token_ids"
_NO_IDS, _NO_VALUES = np.zeros(0, np.int64), np.zeros(0, np.float32)


@dataclass(frozen=True, eq=False)
class LogitBias:
    """What is added to the logits of some tokens of a row: int64 [n], no token twice, and fp32 [n]."""

    ids: Array = field(default_factory=_NO_IDS.copy)
    values: Array = field(default_factory=_NO_VALUES.copy)

    def __bool__(self) -> bool:
        return bool(len(self.ids))


def parse_logit_bias(sent: Inputs, vocab_size: int) -> list[LogitBias]:
    """Read the biases of each row; without the tensors there are none.

    Raises:
        RequestError: one tensor lacks the other, or a row names a token twice, a token that the vocabulary does not
            have, or a number that is not finite.
    """
    given = [name for name in (_IDS, _VALUES) if name in sent.tensors]
    if not given:
        return [LogitBias()] * sent.batch
    if len(given) == 1:
        raise RequestError(f"{given[0]}: {_IDS} and {_VALUES} come together; send both or none")
    ids = _checked_ids(_IDS, sent, vocab_size)
    values = checked(_VALUES, sent.tensors[_VALUES], (np.float32,), sent.batch, "n")
    if ids.shape != values.shape:
        raise RequestError(f"{_IDS} has shape {list(ids.shape)}, {_VALUES} {list(values.shape)}; send one shape")
    biases = []
    for row, is_given in enumerate(ids >= 0):
        bias = LogitBias(ids[row, is_given], values[row, is_given])
        if not np.isfinite(bias.values).all():
            raise RequestError(f"{_VALUES} holds a number in row {row} that is not finite")
        tokens, counts = np.unique(bias.ids, return_counts=True)
        if (counts > 1).any():
            raise RequestError(f"{_IDS} holds token {tokens[counts.argmax()]} twice in row {row}; once is legal")
        biases.append(bias)
    return biases


def parse_stop_token_ids(sent: Inputs, vocab_size: int) -> list[frozenset[int]]:
    """Read the tokens that end each row beside its end_id; without the tensor there are none."""
    if _STOP not in sent.tensors:
        return [frozenset()] * sent.batch
    return [frozenset(row[row >= 0].tolist()) for row in _checked_ids(_STOP, sent, vocab_size)]


def _checked_ids(name: str, sent: Inputs, vocab_size: int) -> Array:
    ids = checked(name, sent.tensors[name], (np.int32,), sent.batch, "n").astype(np.int64)
    is_bad = (ids < -1) | (ids >= vocab_size)
    if is_bad.any():
        row, place = np.argwhere(is_bad)[0]
        legal = f"0 to {vocab_size - 1}, or -1 for padding"
        raise RequestError(f"{name} holds {ids[row, place]} in row {row}; it must be {legal}")
    if (sent.scalars["beam_width"] > 1).any() and (ids >= 0).any():
        raise RequestError(f"{name}: a beam search does not apply it; leave it out, or send beam_width 1")
    return ids
