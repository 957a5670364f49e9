"""Write the entries of latent attention to their pages, and rotate what is rotated of the queries, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..latent_attention import LatentUp
from ..positions import Rotary
from .elements import rotary_factors

_MANY = 16  # heads of a program


@triton.jit(do_not_specialize=("positions",))
def _keep(
    q, k, kv, turned, pages, offsets, positions, frequencies, gain, q_stride, q_head_stride, k_stride, page_stride, eps,
    factor, plain: tl.constexpr, rotated: tl.constexpr, padded: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
    heads: tl.constexpr, many: tl.constexpr, rotation: tl.constexpr,
):  # fmt: skip
    """The last program of a token norms its latent vector and rotates its key, the others rotate queries."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, padded)
    other, cos, sin, is_rotated = rotary_factors(d, tl.load(positions + token), rotated, frequencies, factor, rotation)
    if part == tl.num_programs(1) - 1:
        dims = tl.arange(0, width)
        source = k + token * k_stride
        page = tl.load(pages + token).to(tl.int64)
        target = kv + page * page_stride + tl.load(offsets + token) * (rotated + size)
        key = tl.load(source + size + d, is_rotated, 0.0).to(tl.float32)
        partner = tl.load(source + size + other, is_rotated, 0.0).to(tl.float32)
        tl.store(target + d, (key * cos + partner * sin).to(kv.dtype.element_ty), is_rotated)
        latent = tl.load(source + dims, dims < size, 0.0).to(tl.float32)
        normed = latent * tl.rsqrt(tl.sum(latent * latent, 0) / size + eps)
        normed *= tl.load(gain + dims, dims < size, 0.0).to(tl.float32)
        tl.store(target + rotated + dims, normed.to(kv.dtype.element_ty), dims < size)
    else:
        head = (part * many + tl.arange(0, many))[:, None]
        is_in = (head < heads) & is_rotated[None, :]
        queries = q + token * q_stride + head * q_head_stride + plain
        query = tl.load(queries + d[None, :], is_in, 0.0).to(tl.float32)
        others = tl.load(queries + other[None, :], is_in, 0.0).to(tl.float32)
        query = query * cos[None, :] + others * sin[None, :]
        tl.store(turned + (token * heads + head) * rotated + d[None, :], query.to(turned.dtype.element_ty), is_in)


def keep(
    q: Tensor,
    narrow: Tensor,
    up: LatentUp,
    kv: Tensor,
    pages: Tensor,
    offsets: Tensor,
    positions: Tensor,
    rotary: Rotary,
) -> Tensor:
    """Write the entries of tokens, and return what is rotated of their queries.

    Args:
        q: [H, T, P + R]; the last axis without gaps.
        narrow: [T, N + R], likewise; see LatentAttend.
        up: of the layer.
        kv: the layer's cache, [1, pages, 1, PAGE, R + N].
        pages: int32 [T].
        offsets: int64 [T], place of each token in its page.
        positions: int64 [T].
        rotary: how to rotate R numbers.

    Returns:
        [T, H, R].
    """
    (heads, tokens, _), size = q.shape, up.matrix.shape[2]
    turned = torch.empty(tokens, heads, rotary.width, dtype=q.dtype, device=q.device)
    many = min(_MANY, triton.next_power_of_2(heads))
    _keep[(tokens, triton.cdiv(heads, many) + 1)](
        q, narrow, kv, turned, pages, offsets, positions, rotary.inverse_frequencies, up.norm.weight,
        q.stride(1), q.stride(0), narrow.stride(0), kv.stride(1), up.norm.eps, rotary.factor,
        plain=up.plain_size, rotated=rotary.width, padded=triton.next_power_of_2(rotary.width), size=size,
        width=triton.next_power_of_2(size), heads=heads, many=many, rotation=1 if rotary.is_by_pairs else 2,
        num_warps=4,
    )  # fmt: skip
    return turned
