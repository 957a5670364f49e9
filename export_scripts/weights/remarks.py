"""The kinds of remarks: what is said of a conversion holds for every target, or for one."""

from __future__ import annotations


class ShardRemark(str):
    """A remark on what FasterTransformer's shards lack or its engine computes; a conversion to another form skips it.

    Every other remark is a plain string.
    """

    __slots__ = ()
