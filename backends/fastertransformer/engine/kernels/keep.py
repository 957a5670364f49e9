"""Keys and values of many tokens go to their pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=("token_stride",))
def _keep(
    k, v, memory, pages, offsets, token_stride, head_stride, page_stride, values_at,
    page_tokens: tl.constexpr, heads: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token, at = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    is_in = at < heads * size
    head, dim = at // size, at % size
    source = token.to(tl.int64) * token_stride + head * head_stride + dim
    cell = tl.load(pages + token).to(tl.int64) * page_stride + tl.load(offsets + token) * size
    target = memory + cell + head * page_tokens * size + dim
    tl.store(target, tl.load(k + source, is_in), is_in)
    tl.store(target + values_at, tl.load(v + source, is_in), is_in)


def keep(k: Tensor, v: Tensor, memory: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Keep tokens.

    Args:
        k: [H, T, D]; the last axis without gaps.
        v: likewise, with k's strides.
        memory: of a layer, [2, pages, H, PAGE, D].
        pages: int32 [T].
        offsets: int64 [T], place of each token in its page.
    """
    heads, tokens, size = k.shape
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    block = min(2048, triton.next_power_of_2(heads * size))
    _keep[(tokens, triton.cdiv(heads * size, block))](
        k, v, memory, pages, offsets, k.stride(1), k.stride(0), memory.stride(1), memory.stride(0),
        page_tokens=memory.shape[3], heads=heads, size=size, block=block, num_warps=4,
    )  # fmt: skip
