"""Latent attention of rows of one token, in the absorbed form: a program has many heads, which read entries once.

H: heads; N: width of the latent vector; R: of what is rotated. A row's entries are split into pieces, and the last
program of a row and its heads merges them. The token's own entry is in the cache already. See ops/latent_attention.py
for what an entry is, and row_plan.py for the order of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_attention import LEAST_SCORE
from .elements import LOG2_E
from .grouped_pieces import MOST_PIECES
from .latent_pieces import load_queries, over_entries, store_merged, store_piece
from .launch import scratch_of, uses_pdl
from .prefill_attention import shared_bytes
from .row_plan import FIELDS

_SHARED_BYTES = 147456  # of a program with 64 heads
_VARYING = ("head_stride", "table_stride", "pieces", "least", "slots")


class LatentTiles(NamedTuple):
    """How the entries of rows are split over programs.

    Attributes:
        least: entries of a piece at least; up to twice as many are one piece.
        programs: for each processor at most.
        block: entries that a program holds at a time.
        stages: of the pipeline that copies entries to shared memory.
    """

    least: int = 64
    programs: int = 2
    block: int = 32
    stages: int = 2


@triton.jit(do_not_specialize=_VARYING)
def _attend_latent(
    turned, absorbed, kv, tables, plan, out, partial, finished, head_stride, table_stride, page_stride, scale, pieces,
    least, heads: tl.constexpr, many: tl.constexpr, rotated: tl.constexpr, padded: tl.constexpr, size: tl.constexpr,
    width: tl.constexpr, page_tokens: tl.constexpr, block: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    part, piece, place = tl.program_id(0), tl.program_id(1), plan + tl.program_id(2)
    parts_of_heads, rows = tl.num_programs(0), tl.num_programs(2)
    row = tl.load(place)
    token = tl.load(place + rows)
    table = tables + tl.load(place + 2 * rows) * table_stride
    length = tl.minimum(tl.load(place + 3 * rows) + 1, tl.load(place + 4 * rows)).to(tl.int32)
    piece_cells = tl.maximum(tl.cdiv(tl.cdiv(length, pieces), block) * block, least)
    piece_cells = tl.where(length <= 2 * least, 2 * least, piece_cells)
    start = piece * piece_cells
    if start >= length:
        return
    end = tl.minimum(start + piece_cells, length)
    head = (part * many + tl.arange(0, many)).to(tl.int64)
    is_head = head < heads
    query_turned, query_absorbed = load_queries(
        turned, absorbed, token, head, is_head, head_stride, heads, rotated, padded, size, width
    )
    sums, total, most = over_entries(
        tl.zeros((many, width), tl.float32), tl.zeros((many,), tl.float32),
        tl.full((many,), LEAST_SCORE, tl.float32), query_turned, query_absorbed,
        tl.full((many,), 0x7FFFFFFF, tl.int32), kv, table, start, end, page_stride, scale, page_tokens, rotated, padded,
        size, width, block, stages,
    )  # fmt: skip
    targets = out + head * head_stride + token * size
    parts = tl.cdiv(length, piece_cells)
    if parts == 1:
        dims = tl.arange(0, width)
        is_out = is_head[:, None] & (dims < size)[None, :]
        tl.store(targets[:, None] + dims[None, :], (sums / total[:, None]).to(out.dtype.element_ty), is_out)
        return
    counter = finished + row * parts_of_heads + part
    every = partial + (row * parts_of_heads + part) * pieces * (many * (width + 2))
    store_piece(every + piece * (many * (width + 2)), sums, total, most, many, width)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != parts - 1:
        return
    tl.store(counter, 0)
    store_merged(targets, is_head, every, parts, 1, many, size, width)


def attend_latent(
    turned: Tensor,
    absorbed: Tensor,
    kv: Tensor,
    tables: Tensor,
    plan: Tensor,
    scale: float,
    out: Tensor | None = None,
    tiles: LatentTiles | None = None,
) -> Tensor:
    """Attend from the newest token of each row to all that the row's pages hold.

    Args:
        turned: [T, H, R], rotated, contiguous.
        absorbed: [H, T, N], contiguous.
        kv: a layer's cache, [1, pages, 1, PAGE, R + N].
        tables: int32 [rows, width], pages of each row; of packed rows, of each slot.
        plan: of these rows; see plan_rows.
        scale: of q k.
        out: [H, T, N], which takes the results of packed rows of one token; None: there is one token of each row.
        tiles: None: by shape.

    Returns:
        [H, T, N].
    """
    heads, _, size = absorbed.shape
    rows, scratch, itemsize = len(plan) // FIELDS, scratch_of(absorbed.device), absorbed.itemsize
    tiles = tiles or (LatentTiles() if itemsize < 4 else LatentTiles(block=16, stages=1))
    many = min(max(16, triton.next_power_of_2(heads)), most_heads(absorbed))
    parts, width = triton.cdiv(heads, many), max(16, triton.next_power_of_2(size))
    pieces = max(1, min(MOST_PIECES, tiles.programs * scratch.processors // (rows * parts)))
    numbers = rows * parts * pieces * many * (width + 2) if pieces > 1 else 0
    partial, finished = scratch.get(rows * parts, numbers)
    out = torch.empty_like(absorbed) if out is None else out
    _attend_latent[(parts, pieces, rows)](
        turned, absorbed, kv, tables, plan, out, partial, finished, absorbed.stride(0), tables.stride(0), kv.stride(1),
        scale * LOG2_E.value, pieces, tiles.least, heads=heads, many=many, rotated=turned.shape[2],
        padded=max(16, triton.next_power_of_2(turned.shape[2])), size=size, width=width, page_tokens=kv.shape[3],
        block=tiles.block, stages=tiles.stages, num_warps=4 if many == 16 else 8,
    )  # fmt: skip
    return out


def most_heads(like: Tensor) -> int:
    """Return how many heads, or heads of several tokens, a program has at most: registers hold what they attend."""
    if like.dtype == torch.float32:
        return 16
    return 64 if uses_pdl(like.device) and shared_bytes(like.device) >= _SHARED_BYTES else 32
