"""Which experts a token uses, and what each of them counts: the choice of a router, from its scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .linear import Linear

LEAST_SUM = 1e-20  # of scores that are divided by it


@dataclass(frozen=True)
class Router:
    """A router.

    Attributes:
        linear: hidden -> experts; its product is a score before softmax or sigmoid.
        used: experts that a token uses.
        is_sigmoid: whether a score is the sigmoid of its product, else the softmax over all experts.
        choice_bias: fp32 [experts], added to the scores to choose, and for that alone; None: nothing is.
        is_normalised: whether the scores of the chosen are divided by their sum.
        scale: what they are multiplied by then.
        groups: of experts, of which some are chosen first; 1: there are none.
        groups_used: those that a token's experts are in.
        is_group_of_two: whether a group counts as its two best experts together, else as its best.
    """

    linear: Linear
    used: int
    is_sigmoid: bool
    choice_bias: Tensor | None
    is_normalised: bool
    scale: float
    groups: int
    groups_used: int
    is_group_of_two: bool


def choose(router: Router, products: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token.

    Args:
        router: which.
        products: of its linear layer, fp32 [N, experts].

    Returns:
        int64 [N, used], the chosen; and fp32 [N, used], what each of them counts.
    """
    scores = products.sigmoid() if router.is_sigmoid else products.softmax(-1)
    chosen = _best(router, scores if router.choice_bias is None else scores + router.choice_bias)
    counts = scores.gather(1, chosen)
    if router.is_normalised:
        counts /= counts.sum(-1, keepdim=True) + LEAST_SUM
    return chosen, counts if router.scale == 1 else counts * router.scale


def _best(router: Router, scores: Tensor) -> Tensor:
    """Return the experts with the highest scores, of the best groups."""
    if router.groups_used < router.groups:
        grouped = scores.view(len(scores), router.groups, -1)
        best = grouped.topk(2, -1)[0].sum(-1) if router.is_group_of_two else grouped.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(router.groups_used)[1], True)
        scores = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    return scores.topk(router.used)[1]
