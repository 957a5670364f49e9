"""An answer to a request, as the engine's callers get it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from ..arrays import Array

# Names of Triton's error codes.
INVALID, FAILED, CANCELLED, UNAVAILABLE = "INVALID_ARG", "INTERNAL", "CANCELLED", "UNAVAILABLE"


@dataclass(slots=True)  # not frozen, which takes three times as long to make: each token of a stream has one
class TokensSoFar:
    """The generated tokens of a request's only row, without a copy of them.

    Attributes:
        ids: which the engine appends to.
        count: how many of these there are so far.
    """

    ids: array[int]
    count: int


@dataclass(slots=True)
class Answer:
    """An answer to a request.

    Attributes:
        tensors: the output so far by FasterTransformer's names, see outputs.py; None: the request failed, or wants
            ``tokens``.
        problem: why it failed.
        is_final: whether this is the last answer. A request that does not stream gets one only.
        code: of the failure, a name of pb_utils.TritonError.
        tokens: the output so far of a request that wants its tokens alone.
        logged: what a log says in place of ``problem``, which quotes the request; empty: the problem.
    """

    tensors: dict[str, Array] | None
    problem: str | None = None
    is_final: bool = True
    code: str = ""
    tokens: TokensSoFar | None = None
    logged: str = ""


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
