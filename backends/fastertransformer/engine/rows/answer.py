"""An answer to a request, as the engine's callers get it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..arrays import Array

# Names of Triton's error codes.
INVALID, FAILED, CANCELLED, UNAVAILABLE = "INVALID_ARG", "INTERNAL", "CANCELLED", "UNAVAILABLE"


# Not frozen, which takes three times as long to make: each token of a stream has one.
@dataclass(slots=True)
class Tensors:
    """The output so far.

    Attributes:
        tensors: by FasterTransformer's names, see outputs.py.
        is_final: whether this is the last answer. A request that does not stream gets one only.
    """

    tensors: Mapping[str, Array]
    is_final: bool = True


@dataclass(slots=True)
class Tokens:
    """The generated tokens so far of a request's only row, without a copy of them.

    Attributes:
        ids: which the engine appends to.
        count: how many of these there are so far.
        is_final: see Tensors.
    """

    ids: array[int]
    count: int
    is_final: bool = True


@dataclass(slots=True)
class Failure:
    """Why a request has failed; it gets no further answer.

    Attributes:
        problem: for the client.
        code: a name of pb_utils.TritonError, or direct.messages.CLOSING.
        logged: what a log says in place of the problem, which quotes the request; empty: the problem.
    """

    problem: str
    code: str = FAILED
    logged: str = ""
    is_final: ClassVar[bool] = True


Answer = Tensors | Tokens | Failure


@dataclass(frozen=True)
class Outline:
    """What all answers to a request have in common.

    Attributes:
        ids: output_ids without generated tokens.
        lengths: int32 [B, K], of what a row's answer begins with.
        is_decoder: whether the model is an encoder-decoder.
        has_log_probs: whether a row has is_return_log_probs.
        has_raw_scores: whether a row has is_return_raw_log_probs.
    """

    ids: Array
    lengths: Array
    is_decoder: bool
    has_log_probs: bool
    has_raw_scores: bool
