"""Latent attention of long chunks behind a long context, in the plain form: what each head attends to is made.

Per token and entry the plain form takes a third of the absorbed form's operations, and torch's flash attention runs at
several times the rate of the kernel whose heads are N wide. But keys and values of all heads must be made of what a row
has cached, piece by piece: that pays where many tokens see them. Pieces are merged by the logarithms of the sums of
their weights. The host has to know where rows begin, so no CUDA graph has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..arrays import upload
from ..cache.kv_cache import PAGE
from .latent_attention import LatentUp
from .packed_rows import Rows

LEAST_TOKENS = 384
"""A row with fewer stays in the absorbed form, in a CUDA graph. With 64 here eight prompts of 8,000 tokens, in parts of
1,792 down to 256, took a fifth longer than in the absorbed form alone, in parts of 4,096 down to 512 less than half as
long (DeepSeek V2 Lite, H200, 2026-11-28)."""
LEAST_PAIRS = 1 << 20
"""Tokens times cached entries, in a pass: fewer gain less than launching without a CUDA graph costs."""
_PIECE_BYTES = 256 << 20
"""Keys and values that are made at a time."""


def long_rows(starts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return which rows of a pass are best continued in the plain form; none if they have few pairs together.

    Args:
        starts: position of each row's first token.
        lengths: of the rows.
    """
    rows = [row for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
            if start and length >= LEAST_TOKENS]  # fmt: skip
    return rows if sum(starts[row] * lengths[row] for row in rows) >= LEAST_PAIRS else []


class _Row(NamedTuple):
    """A row: its tokens, from ``begin`` to ``end`` of the pass, and its entries before them."""

    begin: int
    end: int
    start: int
    pages: Tensor


class ContinuedRows:
    """The rows of a pass that are continued in the plain form, and the rest.

    Args:
        rows: of the pass; the host knows their lengths and starts.
        chosen: which of them, as long_rows says.
        tables: int32 [slots, width], pages of each slot.
        scale: of q k.

    Attributes:
        rest: the other rows; None: there are none.
        of_rest: int64, where their tokens are.
    """

    rest: Rows | None = None

    def __init__(self, rows: Rows, chosen: Sequence[int], tables: Tensor, scale: float) -> None:
        assert rows.lengths and rows.starts, "the host knows the rows"
        self._scale, self._rows = scale, list[_Row]()
        begin, others, lengths = 0, list[int](), list[int]()
        for row, length in enumerate(rows.lengths):
            if row in chosen:
                start, end = rows.starts[row], begin + length
                count = -(-(start + length) // PAGE)
                pages = tables[rows.slots[begin : begin + 1]][0, :count].long()
                self._rows.append(_Row(begin, end, start, pages))
            else:
                others.extend(range(begin, begin + length))
                lengths.append(length)
            begin += length
        if others:
            self.of_rest = upload(np.array(others), rows.ids.device)
            ids, positions, slots = (each[self.of_rest] for each in rows[:3])
            ends = upload(np.cumsum([0, *lengths], dtype=np.int32), rows.ids.device)
            self.rest = Rows(ids, positions, slots, ends, lengths)

    def attend(self, turned: Tensor, q: Tensor, up: LatentUp, kv: Tensor, out: Tensor) -> None:
        """Attend from the rows' tokens to all that their pages hold, these tokens among it.

        Args:
            turned: [T, H, R], what is rotated of all queries.
            q: [H, T, P + R], of which the first P are read.
            up: of the layer.
            kv: a layer's cache, [1, pages, 1, PAGE, R + N].
            out: [H, T, V]: what belongs to these rows is written.
        """
        heads, size, _ = up.matrix.shape
        wide = max(up.plain_size + turned.shape[2], size - up.plain_size)
        wide += -wide % 8  # as flash attention has it
        most = max(PAGE, _PIECE_BYTES // (heads * (size + 2 * wide) * kv.element_size()) // PAGE * PAGE)
        for row in self._rows:
            tokens = slice(row.begin, row.end)
            query = torch.cat((turned[tokens], q[:, tokens, : up.plain_size].transpose(0, 1)), -1)
            query = F.pad(query, (0, wide - query.shape[2]))
            spans = [(first, min(first + most, row.start)) for first in range(0, row.start, most)]
            merged: tuple[Tensor, Tensor] | None = None
            for first, stop in [*spans, (row.start, row.start + row.end - row.begin)]:
                keys, values = _made(kv, row.pages, first, stop, turned.shape[2], up, wide)
                piece = _flash(query, keys, values, first == row.start, self._scale)
                merged = piece if merged is None else _merge(merged, piece)
            assert merged
            out[:, tokens] = merged[0][..., : out.shape[2]].transpose(0, 1)


def _made(
    kv: Tensor, pages: Tensor, first: int, stop: int, rotated: int, up: LatentUp, wide: int
) -> tuple[Tensor, Tensor]:
    """Make keys and values of a row's entries from ``first`` to before ``stop``, [S, H, wide] each."""
    held = kv[0, pages[first // PAGE : -(-stop // PAGE)], 0].flatten(0, 1)[first % PAGE :][: stop - first]
    heads, size, _ = up.matrix.shape
    made = F.linear(held[:, rotated:], up.matrix.flatten(0, 1)).view(-1, heads, size)
    keys = torch.cat((held[:, None, :rotated].expand(-1, heads, -1), made[..., : up.plain_size]), -1)
    keys, values = (F.pad(each, (0, wide - each.shape[2])) for each in (keys, made[..., up.plain_size :]))
    return keys, values


def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attend, [T, H, D] each, and return also the logarithm of each query's sum of weights, fp32 [T, H, 1]."""
    if q.is_cuda and q.dtype != torch.float32:
        many = len(q), len(k)
        found = torch.ops.aten._flash_attention_forward(
            q[None], k[None], v[None], None, None, *many, 0.0, is_causal, False, scale=scale
        )
        return found[0][0], found[1][0].T[..., None]
    parts = (each.transpose(0, 1)[None] for each in (q, k, v))
    if q.is_cuda:
        found = torch.ops.aten._scaled_dot_product_efficient_attention(*parts, None, True, 0.0, is_causal, scale=scale)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, is_causal, scale=scale)
    return found[0][0].transpose(0, 1), found[1][0, :, : len(q)].T[..., None]


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge what queries have attended to in two pieces; in fp32 until all are."""
    total = torch.logaddexp(one[1], other[1])
    return one[0] * (one[1] - total).exp() + other[0] * (other[1] - total).exp(), total
