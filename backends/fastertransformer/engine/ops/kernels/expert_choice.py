"""Which experts a token uses, and pairs of token and expert sorted by expert: shapes do not depend on the choice.

A pair is a token's number times the experts that it uses, and the place of the expert among these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..routing import LEAST_SUM, Router
from .launch import uses_pdl

_FEW_PAIRS, _MANY_PAIRS = (1024, 4), (4096, 8)  # that a program sorts at a time, and its warps


@triton.jit
def _choose(
    chosen, counts, products, choice_bias, experts, group_size, scale, least_sum,
    used: tl.constexpr, padded: tl.constexpr, width: tl.constexpr, is_sigmoid: tl.constexpr,
    has_choice_bias: tl.constexpr, is_normalised: tl.constexpr, groups: tl.constexpr, groups_used: tl.constexpr,
    is_group_of_two: tl.constexpr, uses_pdl: tl.constexpr,
):  # fmt: skip
    """Choose a token's experts; see routing.choose. Products are fp32, padded is a power of two from ``used`` on."""
    if uses_pdl:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, width)
    is_expert = expert < experts
    x = tl.load(products + row * experts + expert, is_expert, float("-inf"))
    if is_sigmoid:
        scores = tl.where(is_expert, tl.sigmoid(x), 0.0)
    else:
        powers = tl.exp(x - tl.max(x, 0))
        scores = powers / tl.sum(powers, 0)
    best = scores
    if has_choice_bias:
        best += tl.load(choice_bias + expert, is_expert, 0.0)
    best = tl.where(is_expert, best, float("-inf"))
    if groups_used < groups:
        values = tl.full([width], float("-inf"), tl.float32)  # of an expert's group
        for group in tl.static_range(groups):
            is_in = expert // group_size == group
            own = tl.where(is_in, best, float("-inf"))
            value = tl.max(own, 0)
            if is_group_of_two:
                value += tl.max(tl.where(expert == tl.argmax(own, 0), float("-inf"), own), 0)
            values = tl.where(is_in & is_expert, value, values)
        is_kept = expert < 0
        for _ in tl.static_range(groups_used):
            is_in = expert // group_size == tl.argmax(values, 0) // group_size
            is_kept = is_kept | is_in
            values = tl.where(is_in, float("-inf"), values)
        best = tl.where(is_kept, best, float("-inf"))
    lane = tl.arange(0, padded)
    found = tl.zeros([padded], tl.int32)
    weights = tl.zeros([padded], tl.float32)
    for place in tl.static_range(used):
        index = tl.minimum(tl.argmax(best, 0), experts - 1)  # of what is not a number, it may be any
        found = tl.where(lane == place, index, found)
        weights = tl.where(lane == place, tl.sum(tl.where(expert == index, scores, 0.0), 0), weights)
        best = tl.where(expert == index, float("-inf"), best)
    if is_normalised:
        weights = weights / (tl.sum(weights, 0) + least_sum)
    tl.store(chosen + row * used + lane, found.to(tl.int64), lane < used)
    tl.store(counts + row * used + lane, weights * scale, lane < used)


@triton.jit(do_not_specialize=["pairs"])
def _sort(order, ends, chosen, pairs, experts, block: tl.constexpr, uses_pdl: tl.constexpr):
    """Write the pairs of an expert to their places, and behind which place they end; see sort_by_expert.

    Each program reads all pairs: first it counts those of lower experts, behind which its own begin. The last one has
    the pairs that are of no expert.
    """
    if uses_pdl:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    lane = tl.arange(0, block)
    lower = tl.zeros([block], tl.int32)
    for start in range(0, pairs, block):
        used = tl.load(chosen + start + lane, start + lane < pairs, experts).to(tl.int32)
        lower += (used < expert).to(tl.int32)
    place = tl.sum(lower, 0)
    for start in range(0, pairs, block):
        pair = start + lane
        is_own = tl.load(chosen + pair, pair < pairs, -1).to(tl.int32) == expert
        behind = place + tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order + behind - 1, pair, is_own)
        place = tl.max(behind, 0)
    tl.store(ends + expert, place, expert < experts)


def choose(router: Router, products: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token; see routing.choose."""
    rows, experts = products.shape
    chosen = torch.empty(rows, router.used, dtype=torch.long, device=products.device)
    counts = torch.empty(rows, router.used, dtype=torch.float32, device=products.device)
    has_pdl = uses_pdl(products.device)
    _choose[(rows,)](
        chosen, counts, products, router.choice_bias, experts, experts // router.groups, router.scale, LEAST_SUM,
        used=router.used, padded=triton.next_power_of_2(router.used), width=triton.next_power_of_2(experts),
        is_sigmoid=router.is_sigmoid, has_choice_bias=router.choice_bias is not None,
        is_normalised=router.is_normalised, groups=router.groups, groups_used=router.groups_used,
        is_group_of_two=router.is_group_of_two, num_warps=1, uses_pdl=has_pdl, launch_pdl=has_pdl,
    )  # fmt: skip
    return chosen, counts


def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort pairs by expert, those of one expert as they come.

    Args:
        chosen: int64 [N, used].
        experts: how many there are.

    Returns:
        int32 [N * used], the pairs in their new order; int32 [experts], behind which place each expert's end.
    """
    pairs = chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    ends = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    (block, warps), has_pdl = _FEW_PAIRS if pairs <= _FEW_PAIRS[0] else _MANY_PAIRS, uses_pdl(chosen.device)
    _sort[(experts + 1,)](
        order, ends, chosen, pairs, experts, block=block, uses_pdl=has_pdl, num_warps=warps, launch_pdl=has_pdl
    )
    return order, ends
