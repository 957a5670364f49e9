"""Mamba 2's recurrence in torch: a memory S of each head that every token lets fade, and adds itself to.

    S = exp(A dt) S + dt x B^T,  y = S C + D x

A chunk's tokens are computed together: what they add to each other by products like those of attention, and what the
memory before them adds by one more. Formulas: Dao and Gu, "Transformers are SSMs". B: rows; L: tokens of a chunk; H:
heads; P: width of a head; G: groups of heads; N: numbers of the memory for each element of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MambaRecurrence:
    """It goes from x, [T, H, P], dt, [T, H], B and C, [T, G, N], to y, [T, H, P], by a memory [B, H, P, N].

    Attributes:
        decay: A, fp32 [H], below 0.
        skip: D, fp32 [H].
    """

    decay: Tensor
    skip: Tensor

    def step(self, given: Sequence[Tensor], memory: Tensor) -> tuple[Tensor, Tensor]:
        """See Recurrence."""
        x, step, into, out_of = given
        into, out_of = (of_heads(each, x.shape[1]) for each in (into, out_of))
        memory.mul_(torch.exp(self.decay * step)[..., None, None])
        memory.addcmul_((step[..., None] * x)[..., None], into[:, :, None])
        return (memory @ out_of[..., None]).squeeze(-1) + self.skip[:, None] * x, memory

    def run_chunk(self, given: Sequence[Tensor], is_there: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See Recurrence."""
        x, step, *of_groups = given
        step, heads = step * is_there, x.shape[2]
        faded = (self.decay * step).cumsum(1).transpose(1, 2)  # [B, H, L]
        into, out_of = (each.transpose(1, 2) for each in of_groups)  # [B, G, L, N]
        scores = of_heads(out_of @ into.mT, heads) * decays_between(faded)  # [B, H, L, L]
        added = (x * step[..., None]).transpose(1, 2)  # [B, H, L, P]
        into, out_of = of_heads(into, heads), of_heads(out_of, heads)
        found = scores @ added + faded.exp()[..., None] * (out_of @ memory.mT)
        last = faded[..., -1:]
        memory = last.exp()[..., None] * memory + (added * (last - faded).exp()[..., None]).mT @ into
        return found.transpose(1, 2) + self.skip[:, None] * x, memory


def of_heads(shared: Tensor, heads: int) -> Tensor:
    """Repeat what heads share, [B, G, ...] -> [B, H, ...]; those that share follow one another."""
    return shared.repeat_interleave(heads // shared.shape[1], 1)


def decays_between(faded: Tensor) -> Tensor:
    """Return how much of what a token adds is left at those after it, 0 before, [B, H, L] -> [B, H, L, L].

    Args:
        faded: the logarithm of how much a memory has faded with each token.
    """
    between = faded[..., None] - faded[..., None, :]
    is_later = torch.ones(between.shape[-2:], dtype=torch.bool, device=between.device).triu(1)
    return between.masked_fill(is_later, -torch.inf).exp()
