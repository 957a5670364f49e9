"""Products with adapters' thin matrices, of rows sorted by adapter: only those of adapters that have rows are read.

The first product ends in few numbers a row, so its inputs are cut into parts that programs sum by themselves, and the
second product adds these. Both have the same programs whatever adapters the rows have, so a CUDA graph holds for all;
those that are too many end at once. A row's numbers do not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..low_rank import LowRank
from .expert_choice import sort_by_expert
from .grouped_gemm import find_rows

_FEW_TOKENS = 512  # up to which blocks have 16 rows, and the inputs are cut into parts
_PARTS = 8


@triton.jit(do_not_specialize=["tokens"])
def _narrow(
    h, x, down, order, ends, adapters, tokens, inputs, ranks,
    width: tl.constexpr, block_m: tl.constexpr, block_r: tl.constexpr, block_k: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    """Multiply rows by their adapters' first matrices: x, [tokens, inputs] -> h, fp32 [parts, sorted tokens, ranks]."""
    place, first, last = find_rows(ends, tl.program_id(1), adapters, width, block_m)
    if first < last:
        row = first + tl.arange(0, block_m)
        is_row = row < last
        source = tl.load(order + row, is_row, 0).to(tl.int64)
        r = tl.program_id(0) * block_r + tl.arange(0, block_r)
        is_r = r < ranks
        at = down + place.to(tl.int64) * ranks * inputs + tl.where(is_r, r, 0)[None, :] * inputs
        size = tl.cdiv(inputs, parts * block_k) * block_k
        begin = tl.program_id(2) * size
        sums = tl.zeros([block_m, block_r], tl.float32)
        for start in range(begin, tl.minimum(begin + size, inputs), block_k):
            k = start + tl.arange(0, block_k)
            values = tl.load(x + source[:, None] * inputs + k[None, :], is_row[:, None] & (k < inputs)[None, :], 0)
            sums = tl.dot(values, tl.load(at + k[:, None], (k < inputs)[:, None], 0), sums, input_precision="ieee")
        target = h + (tl.program_id(2) * tokens + row)[:, None] * ranks + r[None, :]
        tl.store(target, sums, is_row[:, None] & is_r[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _widen(
    y, h, up, order, ends, adapters, tokens, outputs, ranks, rank, first_end, second_end,
    width: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_r: tl.constexpr, parts: tl.constexpr,
    matrices: tl.constexpr,
):  # fmt: skip
    """Multiply h, see above, by the second matrices, and add that to y, [tokens, outputs].

    Of several matrices the first two end at ``first_end`` and ``second_end``; each has its own numbers of h.
    """
    place, first, last = find_rows(ends, tl.program_id(1), adapters, width, block_m)
    if first < last:
        row = first + tl.arange(0, block_m)
        is_row = row < last
        begin = tl.program_id(0) * block_n
        n = begin + tl.arange(0, block_n)
        target = tl.load(order + row, is_row, 0).to(tl.int64)
        at = y + target[:, None] * outputs + n[None, :]
        mask = is_row[:, None] & (n < outputs)[None, :]
        before = tl.load(at, mask, 0)  # what is loaded early is there when it is needed
        matrix = up + place.to(tl.int64) * outputs * rank
        sums = tl.zeros([block_m, block_n], tl.float32)
        for part in tl.static_range(matrices):
            start = 0 if part == 0 else first_end if part == 1 else second_end
            end = outputs if part == matrices - 1 else first_end if part == 0 else second_end
            if (begin < end) & (begin + block_n > start):
                is_n = (n >= start) & (n < end)
                for block in range(0, rank, block_r):
                    r = block + tl.arange(0, block_r)
                    is_r = r < rank
                    tile = tl.load(matrix + n[None, :] * rank + r[:, None], is_n[None, :] & is_r[:, None], 0)
                    narrow = tl.zeros([block_m, block_r], tl.float32)
                    for piece in tl.static_range(parts):
                        place_of_h = (piece * tokens + row)[:, None] * ranks + (part * rank + r)[None, :]
                        narrow += tl.load(h + place_of_h, is_row[:, None] & is_r[None, :], 0)
                    sums = tl.dot(narrow.to(tile.dtype), tile, sums, input_precision="ieee")
        tl.store(at, (before.to(tl.float32) + sums).to(y.dtype.element_ty), mask)


class SortedRows:
    """Tokens in the order of their adapters; see low_rank.AdaptedRows.

    Args:
        adapters: int64 [T], place of each token's adapter; ``count``: it has none.
        count: places.
    """

    def __init__(self, adapters: Tensor, count: int) -> None:
        self._tokens, self._count = len(adapters), count
        self._order, self._ends = sort_by_expert(adapters[:, None], count)

    def add(self, y: Tensor, x: Tensor, low_rank: LowRank) -> None:
        """See AdaptedRows."""
        tokens, is_few = self._tokens, self._tokens <= _FEW_TOKENS
        block_m, parts = (16, _PARTS) if is_few else (64, 1)
        _, ranks, inputs = low_rank.down.shape
        outputs, rank, ends = y.shape[-1], low_rank.rank, low_rank.ends
        h = torch.empty(parts, tokens, ranks, dtype=torch.float32, device=x.device)
        blocks = min(tokens, (tokens + min(tokens, self._count) * (block_m - 1)) // block_m)
        rows = (self._order, self._ends, self._count, tokens)
        width = triton.next_power_of_2(self._count)
        # Few rows wait for memory alone: narrow tiles make many programs, which take few turns each.
        block_r = 16 if is_few else max(16, min(64, triton.next_power_of_2(ranks)))
        block_k = (512 if is_few else 256) // x.element_size()
        _narrow[(triton.cdiv(ranks, block_r), blocks, parts)](
            h, x.reshape(tokens, inputs).contiguous(), low_rank.down, *rows, inputs, ranks,
            width=width, block_m=block_m, block_r=block_r, block_k=block_k, parts=parts, num_warps=4,
        )  # fmt: skip
        block_n, warps = (256, 8) if is_few and outputs >= 8192 else (128, 4 if is_few else 8)
        _widen[(triton.cdiv(outputs, block_n), blocks)](
            y, h, low_rank.up, *rows, outputs, ranks, rank, ends[0], ends[min(1, len(ends) - 1)],
            width=width, block_m=block_m, block_n=block_n, block_r=max(16, min(32, triton.next_power_of_2(rank))),
            parts=parts, matrices=len(ends), num_warps=warps,
        )  # fmt: skip
