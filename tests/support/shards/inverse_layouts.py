"""Layouts undone, by which a property test compares."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray


def qkv_block_to_by_head(blocks: NDArray[Any], dims: Any) -> NDArray[Any]:
    """Undo ``qkv_by_head_to_block``, of a weight [hidden, 3, head_num, size_per_head] or of a bias."""
    rows = dims.head_num * 3 * dims.size_per_head
    if blocks.ndim == 3:
        return blocks.swapaxes(0, 1).reshape(rows)
    return blocks.transpose(2, 1, 3, 0).reshape(rows, blocks.shape[0])
