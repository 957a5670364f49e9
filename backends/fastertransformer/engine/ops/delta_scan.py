"""The gated delta rule's recurrence in torch: a head's memory S fades, and learns a token's value by its key.

    S = exp(g) S,  S = S + k (beta (v - k^T S))^T,  y = q^T S

What a chunk's tokens learn depends on what those before them have learnt: a triangular system. Formulas: Yang et al.,
"Gated Delta Networks". B: rows; L: tokens of a chunk; H: heads of values; G: heads of queries and keys, which the heads
of values share; K, V: widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .mamba_scan import decays_between, of_heads

_EPS = 1e-6  # added to the square of a query's or key's length


class DeltaRecurrence:
    """It goes from q and k, [T, G, K], v, [T, H, V], g and beta, [T, H], to y, [T, H, V], by a memory [B, H, K, V]."""

    def step(self, given: Sequence[Tensor], memory: Tensor) -> tuple[Tensor, Tensor]:
        """See Recurrence."""
        query, key, value, fading, rate = given
        query, key = (of_heads(_unit(each), value.shape[1]) for each in (query, key))
        memory.mul_(fading.exp()[..., None, None])
        learnt = rate[..., None] * (value - (key[..., None, :] @ memory).squeeze(-2))
        memory.addcmul_(key[..., None], learnt[..., None, :])
        return (query[..., None, :] @ memory).squeeze(-2) * key.shape[-1] ** -0.5, memory

    def run_chunk(self, given: Sequence[Tensor], is_there: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See Recurrence."""
        query, key, value = (each.transpose(1, 2) for each in given[:3])  # [B, heads, L, width]
        fading, rate = ((each * is_there).transpose(1, 2) for each in given[3:])  # [B, H, L]
        query, key = (of_heads(_unit(each), value.shape[1]) for each in (query, key))
        faded = fading.cumsum(-1)
        between, own, last = decays_between(faded), faded.exp()[..., None], faded[..., -1:]
        system = rate[..., None] * (key @ key.mT) * between  # its diagonal counts as ones
        wanted = rate[..., None] * (value - own * (key @ memory))
        learnt = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        found = own * (query @ memory) + ((query @ key.mT) * between) @ learnt
        memory = last.exp()[..., None] * memory + (key * (last - faded).exp()[..., None]).mT @ learnt
        return found.transpose(1, 2) * key.shape[-1] ** -0.5, memory


def _unit(x: Tensor) -> Tensor:
    """Give queries or keys the length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
