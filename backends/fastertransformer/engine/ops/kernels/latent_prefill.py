"""Latent attention of rows of several tokens to all that their pages hold, in the absorbed form.

A program has some heads of some tokens of a row. Rows of one token are left to latent_decode. As in grouped_prefill,
several programs share a block of few tokens that see many entries, and the last of them merges; see row_blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_attention import LEAST_SCORE
from .elements import LOG2_E
from .latent_decode import attend_latent, most_heads
from .latent_pieces import load_queries, over_entries, store_merged, store_piece
from .launch import scratch_of
from .row_blocks import BLOCK_FIELDS, PackedRows, Reads, Split

_ALL = 1 << 30  # entries that a token sees
_BLOCK, _WARPS = 32, 8


@triton.jit(do_not_specialize=("table_stride", "head_stride", "positions", "slots"))
def _extend_latent(
    turned, absorbed, kv, out, blocks, tables, slots, positions, partial, finished, head_stride, table_stride,
    page_stride, scale, heads: tl.constexpr, many: tl.constexpr, tokens: tl.constexpr, rotated: tl.constexpr,
    padded: tl.constexpr, size: tl.constexpr, width: tl.constexpr, page_tokens: tl.constexpr, block: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """Compute ``many`` heads of ``tokens`` tokens of a row, or what a piece of the entries adds."""
    part, parts_of_heads = tl.program_id(0), tl.num_programs(0)
    blocks += tl.program_id(1) * BLOCK_FIELDS
    length = tl.load(blocks + 1)
    if length == 0:
        return
    begin, start = tl.load(blocks).to(tl.int64), tl.load(blocks + 2)
    before = tl.load(positions + begin).to(tl.int32)
    table = tables + tl.load(slots + begin) * table_stride
    rows: tl.constexpr = many * tokens
    m = tl.arange(0, rows)
    token, head = start + m // many, (part * many + m % many).to(tl.int64)
    is_in = (token < length) & (head < heads)
    position, token = before + token, begin + token
    query_turned, query_absorbed = load_queries(
        turned, absorbed, token, head, is_in, head_stride, heads, rotated, padded, size, width
    )
    end = before + tl.minimum(start + tokens, length)
    piece, parts = tl.load(blocks + 3), tl.load(blocks + 4)
    count = tl.cdiv(end, block)
    first, stop = count * piece // parts * block, tl.minimum(count * (piece + 1) // parts * block, end)
    sums, total, most = over_entries(
        tl.zeros((rows, width), tl.float32), tl.zeros((rows,), tl.float32),
        tl.full((rows,), LEAST_SCORE, tl.float32), query_turned, query_absorbed, position, kv, table, first, stop,
        page_stride, scale, page_tokens, rotated, padded, size, width, block, stages,
    )  # fmt: skip
    targets = out + head * head_stride + token * size
    if parts == 1:
        dims = tl.arange(0, width)
        attended = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(targets[:, None] + dims[None, :], attended, is_in[:, None] & (dims < size)[None, :])
        return
    place = tl.load(blocks + 5)
    every = partial + ((place - piece) * parts_of_heads + part).to(tl.int64) * (rows * (width + 2))
    store_piece(every + piece.to(tl.int64) * parts_of_heads * (rows * (width + 2)), sums, total, most, rows, width)
    tl.debug_barrier()
    counter = finished + (place - piece) * parts_of_heads + part
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != parts - 1:
        return
    tl.store(counter, 0)
    store_merged(targets, is_in, every, parts, parts_of_heads, rows, size, width)


def extend_latent(
    turned: Tensor,
    absorbed: Tensor,
    kv: Tensor,
    tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: PackedRows,
    scale: float,
    split: Split | None = None,
) -> Tensor:
    """Attend causally from tokens of rows to all that the rows' pages hold, these tokens among it.

    Args:
        turned: [T, H, R], rotated, contiguous.
        absorbed: [H, T, N], contiguous.
        kv: a layer's cache, [1, pages, 1, PAGE, R + N].
        tables: int32 [slots, width], pages of each slot.
        slots: int64 [T].
        positions: int64 [T]; those of a row follow each other.
        rows: of these tokens.
        scale: of q k.
        split: how programs share the entries of a block; None: as is fastest.

    Returns:
        [H, T, N]; what belongs to no row is anything.
    """
    out, (heads, _, size), scratch = torch.empty_like(absorbed), absorbed.shape, scratch_of(absorbed.device)
    attend_latent(turned, absorbed, kv, tables, rows.plan(positions, slots), scale, out)
    most = most_heads(absorbed)
    many, width = min(triton.next_power_of_2(heads), most), max(16, triton.next_power_of_2(size))
    tokens, parts, is_wide = most // many, triton.cdiv(heads, many), absorbed.itemsize == 4
    blocks, shared = rows.cut(tokens, Reads(positions, _ALL, parts, scratch.processors, split or Split()))
    partial, finished = scratch.get(shared * parts, shared * parts * most * (width + 2))
    _extend_latent[(parts, len(blocks))](
        turned, absorbed, kv, out, blocks, tables, slots, positions, partial, finished, absorbed.stride(0),
        tables.stride(0), kv.stride(1), scale * LOG2_E.value, heads=heads, many=many, tokens=tokens,
        rotated=turned.shape[2], padded=max(16, triton.next_power_of_2(turned.shape[2])), size=size, width=width,
        page_tokens=kv.shape[3], block=16 if is_wide else _BLOCK, stages=1 if is_wide else 2, num_warps=_WARPS,
    )  # fmt: skip
    return out
