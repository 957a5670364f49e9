"""Products with adapters' thin matrices, of rows sorted by adapter: only those of adapters that have rows are read.

The first product ends in few numbers a row, so its inputs are cut into parts that programs sum by themselves, and the
second product adds these. Both have the same programs whatever adapters the rows have, so a CUDA graph holds for all;
those that are too many end at once. A row's numbers do not depend on the other rows.

A few rows wait for memory alone. So which rows a program has is written down once a call, and a program asks for its
matrices before the kernel before it has ended. Where all adapters' first matrices lie behind the layer's own, the
layer's product multiplies every row by all of them, and one kernel adds what each row's own adapter makes of that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..linear import Linear
from ..low_rank import LowRank
from .elements import activated
from .expert_choice import sort_by_expert
from .grouped_gemm import find_rows
from .launch import uses_pdl

_FEW_TOKENS = 512  # up to which blocks have 16 rows, and the inputs are cut into parts


@triton.jit
def _share(places, rows, order, ends, adapters, width: tl.constexpr, block_m: tl.constexpr):
    """Write down which adapter a block of rows has, and its rows; -1: it has no rows, -2: its rows have none."""
    block = tl.program_id(0)
    place, first, last = find_rows(ends, block, adapters + 1, width, block_m)
    lane = tl.arange(0, block_m)
    is_row = first + lane < last
    tl.store(places + block, tl.where(first < last, tl.where(place < adapters, place, -2), -1))
    tl.store(rows + block * block_m + lane, tl.load(order + first + lane, is_row, -1))


@triton.jit
def _changing(places, block, marks):
    """Return the adapter of a block of rows; below zero: it has none that changes the layer."""
    place = tl.load(places + block)
    if marks is not None:
        place = tl.where(tl.load(marks + place, place >= 0, 0) > 0, place, -2)
    return place


@triton.jit
def _narrow(
    h, x, down, places, rows, marks, inputs, ranks,
    block_m: tl.constexpr, block_r: tl.constexpr, block_k: tl.constexpr, parts: tl.constexpr, uses_pdl: tl.constexpr,
):  # fmt: skip
    """Multiply rows by their adapters' first matrices: x, [tokens, inputs] -> h, fp32 [parts, blocks' rows, ranks]."""
    if uses_pdl:
        gdc_launch_dependents()
    block = tl.program_id(1)
    place = _changing(places, block, marks)
    lane = tl.arange(0, block_m)
    row = tl.load(rows + block * block_m + lane)
    is_row = row >= 0
    r = tl.program_id(0) * block_r + tl.arange(0, block_r)
    is_r = r < ranks
    at = down + place.to(tl.int64) * ranks * inputs + tl.where(is_r, r, 0)[None, :] * inputs
    size = tl.cdiv(inputs, parts * block_k) * block_k
    begin = tl.program_id(2) * size
    end = tl.minimum(begin + size, inputs)
    k = begin + tl.arange(0, block_k)
    tile = tl.load(at + k[:, None], (k < end)[:, None] & (place >= 0), 0)
    if uses_pdl:
        gdc_wait()  # also where there are no rows: what follows may wait for this kernel alone
    if place >= 0:
        source = x + tl.where(is_row, row, 0).to(tl.int64)[:, None] * inputs
        values = tl.load(source + k[None, :], is_row[:, None] & (k < end)[None, :], 0)
        sums = tl.dot(values, tile, input_precision="ieee")
        for start in range(begin + block_k, end, block_k):
            k = start + tl.arange(0, block_k)
            values = tl.load(source + k[None, :], is_row[:, None] & (k < end)[None, :], 0)
            sums = tl.dot(values, tl.load(at + k[:, None], (k < end)[:, None], 0), sums, input_precision="ieee")
        target = h + ((tl.program_id(2) * tl.num_programs(1) + block) * block_m + lane)[:, None] * ranks + r[None, :]
        tl.store(target, sums, is_r[None, :] & (lane >= 0)[:, None])


@triton.jit
def _widen(
    y, h, up, places, rows, marks, outputs, ranks, rank, first_end, second_end,
    block_m: tl.constexpr, block_n: tl.constexpr, block_r: tl.constexpr, parts: tl.constexpr, matrices: tl.constexpr,
    is_one_block: tl.constexpr, uses_pdl: tl.constexpr,
):  # fmt: skip
    """Multiply h, see above, by the second matrices, and add that to y, [tokens, outputs].

    Of several matrices the first two end at ``first_end`` and ``second_end``; each has its own numbers of h.
    """
    if uses_pdl:
        gdc_launch_dependents()
    block = tl.program_id(1)
    place = _changing(places, block, marks)
    lane = tl.arange(0, block_m)
    row = tl.load(rows + block * block_m + lane)
    is_row = row >= 0
    begin = tl.program_id(0) * block_n
    n = begin + tl.arange(0, block_n)
    matrix = up + place.to(tl.int64) * outputs * rank + n[None, :] * rank
    r = tl.arange(0, block_r)
    if is_one_block:  # of ranks, which all matrices share
        tile = tl.load(matrix + r[:, None], (n < outputs)[None, :] & (r < rank)[:, None] & (place >= 0), 0)
    if uses_pdl:
        gdc_wait()  # see above
    if place >= 0:
        at = y + tl.where(is_row, row, 0).to(tl.int64)[:, None] * outputs + n[None, :]
        mask = is_row[:, None] & (n < outputs)[None, :]
        before = tl.load(at, mask, 0)
        sums = tl.zeros([block_m, block_n], tl.float32)
        for part in tl.static_range(matrices):
            start = 0 if part == 0 else first_end if part == 1 else second_end
            end = outputs if part == matrices - 1 else first_end if part == 0 else second_end
            if (begin < end) & (begin + block_n > start):
                is_n = (n >= start) & (n < end)
                for first in range(0, rank, block_r):
                    is_r = first + r < rank
                    if not is_one_block:
                        tile = tl.load(matrix + (first + r)[:, None], is_n[None, :] & is_r[:, None], 0)
                    narrow = tl.zeros([block_m, block_r], tl.float32)
                    for piece in tl.static_range(parts):
                        of_h = (piece * tl.num_programs(1) + block) * block_m + lane
                        place_of_h = of_h[:, None] * ranks + (part * rank + first + r)[None, :]
                        narrow += tl.load(h + place_of_h, is_r[None, :] & (lane >= 0)[:, None], 0)
                    own = tl.where(is_n[None, :], tile, 0) if is_one_block else tile
                    sums = tl.dot(narrow.to(tile.dtype), own, sums, input_precision="ieee")
        tl.store(at, (before.to(tl.float32) + sums).to(y.dtype.element_ty), mask)


@triton.jit
def _by_head(
    y, x, down, up, places, rows, marks, inputs, outputs, rank, y_row, y_head, x_row, x_head,
    down_place, down_head, down_r, down_k, up_place, up_head, up_n, up_r,
    block_m: tl.constexpr, block_n: tl.constexpr, block_r: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Add to y, [heads, tokens, outputs], what adapters make of x, [heads, tokens, inputs], by both matrices at once.

    Of y, x and the matrices there are the strides of all axes but last ones without gaps.
    """
    block, head = tl.program_id(1), tl.program_id(2)
    place = _changing(places, block, marks)
    if place >= 0:
        row = tl.load(rows + block * block_m + tl.arange(0, block_m))
        is_row = (row >= 0)[:, None]
        token = tl.where(row >= 0, row, 0).to(tl.int64)[:, None]
        n = tl.program_id(0) * block_n + tl.arange(0, block_n)
        is_n = (n < outputs)[None, :]
        source = x + token * x_row + head * x_head
        first_matrix = down + place.to(tl.int64) * down_place + head * down_head
        second_matrix = up + place.to(tl.int64) * up_place + head * up_head + n[None, :] * up_n
        sums = tl.zeros([block_m, block_n], tl.float32)
        for first in range(0, rank, block_r):
            r = first + tl.arange(0, block_r)
            is_r = r < rank
            narrow = tl.zeros([block_m, block_r], tl.float32)
            for start in range(0, inputs, block_k):
                k = start + tl.arange(0, block_k)
                is_k = k < inputs
                values = tl.load(source + k[None, :], is_row & is_k[None, :], 0)
                at = first_matrix + k[:, None] * down_k + r[None, :] * down_r
                tile = tl.load(at, is_k[:, None] & is_r[None, :], 0)
                narrow = tl.dot(values, tile, narrow, input_precision="ieee")
            tile = tl.load(second_matrix + r[:, None] * up_r, is_r[:, None] & is_n, 0)
            sums = tl.dot(narrow.to(tile.dtype), tile, sums, input_precision="ieee")
        target = y + token * y_row + head * y_head + n[None, :]
        before = tl.load(target, is_row & is_n, 0).to(tl.float32)
        tl.store(target, (before + sums).to(y.dtype.element_ty), is_row & is_n)


@triton.jit
def _add_own(
    sums, wide, matrix, tile, row_at, behind, n, is_n, is_own, rank, block_r: tl.constexpr, is_one_block: tl.constexpr,
):  # fmt: skip
    """Add what an adapter's second matrix makes of the numbers that are ``behind`` the first of its rows of wide."""
    r = tl.arange(0, block_r)
    if is_one_block:
        narrow = tl.load(wide + row_at + (behind + r)[None, :], is_own & (r < rank)[None, :], 0)
        sums = tl.dot(narrow, tile, sums, input_precision="ieee")
    else:
        for first in range(0, rank, block_r):
            is_r = first + r < rank
            loaded = tl.load(matrix + n[None, :] * rank + (first + r)[:, None], is_n[None, :] & is_r[:, None], 0)
            narrow = tl.load(wide + row_at + (behind + first + r)[None, :], is_own & is_r[None, :], 0)
            sums = tl.dot(narrow, loaded, sums, input_precision="ieee")
    return sums


@triton.jit
def _finish(
    y, wide, up, places, rows, residual, outputs, width, ranks, rank, first_end, second_end,
    block_m: tl.constexpr, block_n: tl.constexpr, block_r: tl.constexpr, matrices: tl.constexpr,
    is_one_block: tl.constexpr, is_gated: tl.constexpr, activation: tl.constexpr, has_residual: tl.constexpr,
    uses_pdl: tl.constexpr,
):  # fmt: skip
    """Compute y [tokens, outputs] = residual + activation(what a layer and its adapters make of a row).

    wide: [tokens, width], the layer's product and behind it those with the first matrices of all adapters. Of several
    second matrices the first two end at ``first_end`` and ``second_end``. If it is gated there are two, of as many
    outputs, and y is instead activation(that of the first) * that of the second.
    """
    if uses_pdl:
        gdc_launch_dependents()
    block = tl.program_id(1)
    place = tl.load(places + block)
    row = tl.load(rows + block * block_m + tl.arange(0, block_m))
    is_row = (row >= 0)[:, None]
    is_own = is_row & (place >= 0)
    begin = tl.program_id(0) * block_n
    n = begin + tl.arange(0, block_n)
    is_n = (n < outputs) & (place >= 0)
    mask = is_row & (n < outputs)[None, :]
    made = 2 * outputs if is_gated else outputs  # by the layer
    matrix = up + place.to(tl.int64) * made * rank
    r = tl.arange(0, block_r)
    tile, other = matrix, matrix
    if is_one_block:  # of ranks, which all matrices share
        is_tile = is_n[None, :] & (r < rank)[:, None]
        tile = tl.load(matrix + n[None, :] * rank + r[:, None], is_tile, 0)
        if is_gated:
            other = tl.load(matrix + (outputs + n)[None, :] * rank + r[:, None], is_tile, 0)
    if uses_pdl:
        gdc_wait()  # see above
    if place != -1:
        to = tl.where(row >= 0, row, 0).to(tl.int64)[:, None]
        row_at, behind = to * width, made + place * ranks
        sums = tl.load(wide + row_at + n[None, :], mask, 0).to(tl.float32)
        if is_gated:
            second = tl.load(wide + row_at + (outputs + n)[None, :], mask, 0).to(tl.float32)
            sums = _add_own(sums, wide, matrix, tile, row_at, behind, n, is_n, is_own, rank, block_r, is_one_block)
            second = _add_own(
                second, wide, matrix + outputs * rank, other, row_at, behind + rank, n, is_n, is_own, rank,
                block_r, is_one_block,
            )  # fmt: skip
            sums = activated(sums, activation) * second
        else:
            for part in tl.static_range(matrices):
                start = 0 if part == 0 else first_end if part == 1 else second_end
                end = outputs if part == matrices - 1 else first_end if part == 0 else second_end
                if (begin < end) & (begin + block_n > start):
                    is_part = is_n & (n >= start) & (n < end)
                    own = tl.where(is_part[None, :], tile, 0) if is_one_block else tile
                    sums = _add_own(
                        sums, wide, matrix, own, row_at, behind + part * rank, n, is_part, is_own, rank, block_r,
                        is_one_block,
                    )  # fmt: skip
            sums = activated(sums, activation)
        at = to * outputs + n[None, :]
        if has_residual:
            sums += tl.load(residual + at, mask, 0).to(tl.float32)
        tl.store(y + at, sums.to(y.dtype.element_ty), mask)


class SortedRows:
    """Tokens in the order of their adapters; see adapted_rows.AdaptedRows.

    Args:
        adapters: int64 [T], place of each token's adapter; ``count``: it has none.
        count: places.
    """

    def __init__(self, adapters: Tensor, count: int) -> None:
        self._adapters, self._count, tokens = adapters, count, len(adapters)
        self._is_few = tokens <= _FEW_TOKENS
        self._block_m = 16 if self._is_few else 64
        blocks = min(tokens, (tokens + min(tokens, count + 1) * (self._block_m - 1)) // self._block_m)
        order, ends = sort_by_expert(adapters[:, None], count + 1)
        self._places = torch.empty(blocks, dtype=torch.int32, device=adapters.device)
        self._rows = torch.empty(blocks, self._block_m, dtype=torch.int32, device=adapters.device)
        width = triton.next_power_of_2(count + 1)
        _share[(blocks,)](self._places, self._rows, order, ends, count, width=width, block_m=self._block_m, num_warps=1)

    def part(self, tokens: slice) -> SortedRows:
        """See AdaptedRows."""
        return SortedRows(self._adapters[tokens], self._count)

    def add(self, y: Tensor, x: Tensor, low_rank: LowRank) -> None:
        """See AdaptedRows."""
        is_few, block_m, blocks = self._is_few, self._block_m, len(self._places)
        _, ranks, inputs = low_rank.down.shape
        outputs, rank, ends = y.shape[-1], low_rank.rank, low_rank.ends
        # Few rows wait for memory alone: narrow tiles make many programs, which take few turns each. Sizes are the
        # fastest of some on an H200, for 64 rows of Llama 3.1 8B's layers.
        parts = (16 if inputs > 8192 else 8 if ranks <= 16 else 4) if is_few else 1
        block_r = 16 if is_few else max(16, min(64, triton.next_power_of_2(ranks)))
        block_k = (512 if is_few else 256) // x.element_size()
        h = torch.empty(parts, blocks * block_m, ranks, dtype=torch.float32, device=x.device)
        has_pdl = uses_pdl(x.device)
        _narrow[(triton.cdiv(ranks, block_r), blocks, parts)](
            h, x.reshape(-1, inputs).contiguous(), low_rank.down, self._places, self._rows, low_rank.marks, inputs,
            ranks, block_m=block_m, block_r=block_r, block_k=block_k, parts=parts, num_warps=4,
            uses_pdl=has_pdl, launch_pdl=has_pdl,
        )  # fmt: skip
        block_n, warps = ((512, 8) if outputs >= 16384 else (256, 4)) if is_few else (128, 8)
        block_r = max(16, min(32, triton.next_power_of_2(rank)))
        _widen[(triton.cdiv(outputs, block_n), blocks)](
            y, h, low_rank.up, self._places, self._rows, low_rank.marks, outputs, ranks, rank, ends[0],
            ends[min(1, len(ends) - 1)], block_m=block_m, block_n=block_n, block_r=block_r, parts=parts,
            matrices=len(ends), is_one_block=rank <= block_r, num_warps=warps, uses_pdl=has_pdl, launch_pdl=has_pdl,
        )  # fmt: skip

    def add_by_head(self, y: Tensor, x: Tensor, down: Tensor, up: Tensor, low_rank: LowRank) -> None:
        """See AdaptedRows."""
        (heads, _, outputs), inputs, rank = y.shape, x.shape[2], down.shape[2]
        assert y.stride(2) == x.stride(2) == 1, "last axes are without gaps"
        strides = [each.stride(axis) if each.shape[axis] > 1 else 0 for each in (down, up) for axis in range(4)]
        block_n, block_r = (max(16, min(most, triton.next_power_of_2(n))) for most, n in ((128, outputs), (32, rank)))
        _by_head[(triton.cdiv(outputs, block_n), len(self._places), heads)](
            y, x, down, up, self._places, self._rows, low_rank.marks, inputs, outputs, rank, y.stride(1), y.stride(0),
            x.stride(1), x.stride(0), *strides, block_m=self._block_m, block_n=block_n, block_r=block_r,
            block_k=64 if x.element_size() == 2 else 32, num_warps=4 if self._is_few else 8,
        )  # fmt: skip

    def multiply(
        self,
        product: Callable[[Linear, Tensor], Tensor],
        linear: Linear,
        x: Tensor,
        activation: str = "",
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> Tensor | None:
        """See AdaptedRows."""
        low_rank = linear.low_rank
        if not (self._is_few and low_rank and linear.with_adapters):
            return None
        made, rank, ends = low_rank.ends[-1], low_rank.rank, low_rank.ends
        outputs = made // 2 if is_gated else made
        if is_gated and ends != [outputs, made]:
            return None
        wide = product(linear.with_adapters, x)
        y = wide.new_empty(*wide.shape[:-1], outputs) if residual is None else residual
        has_pdl = uses_pdl(x.device)
        block_n, warps = (128, 8) if is_gated else (256, 4)  # the fastest of some, see add
        block_r = max(16, min(32, triton.next_power_of_2(rank)))
        _finish[(triton.cdiv(outputs, block_n), len(self._places))](
            y, wide, low_rank.up, self._places, self._rows, residual, outputs, wide.shape[-1], len(ends) * rank, rank,
            ends[0], ends[min(1, len(ends) - 1)], block_m=self._block_m, block_n=block_n, block_r=block_r,
            matrices=len(ends), is_one_block=rank <= block_r, is_gated=is_gated, activation=activation,
            has_residual=residual is not None, num_warps=warps, uses_pdl=has_pdl, launch_pdl=has_pdl,
        )  # fmt: skip
        return y
