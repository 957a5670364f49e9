"""The kinds of remarks: what is said of a conversion holds for every target, or for one."""

from __future__ import annotations


class ShardRemark(str):
    """A remark on what FasterTransformer's shards lack or its engine computes; a conversion to another form skips it.

    Every other remark is a plain string.
    """

    __slots__ = ()


class DequantizedRemark(str):
    """A remark on how quantized weights are read; a conversion that keeps them as they are skips it."""

    __slots__ = ()


EXACT_GELU = ShardRemark(
    "trained with the exact GELU, which config.ini says (exact_gelu) and the drop-in engine computes; NVIDIA's library "
    "computes its tanh form: the function differs by at most 5e-4, logits by a few thousandths"
)
