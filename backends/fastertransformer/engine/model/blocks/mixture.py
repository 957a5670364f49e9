"""The mixture: experts of which a router chooses some for each token, and a feed-forward that every token uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.experts import Experts
from ...ops.linear import Linear, Norm
from ...ops.ops import Ops
from ...ops.routing import Router
from .context import LayerContext
from .feed_forward import DenseWeights


@dataclass(frozen=True)
class MixtureWeights:
    """A mixture of experts. Each process has a slice of every expert's middle or some experts, and the whole router.

    Attributes:
        router: chooses the experts.
        experts: of which a token uses some.
        shared: feed-forward that every token uses; None: there is none.
        shared_gate: hidden -> 1: the sigmoid that multiplies what that computes; None: it counts as it is.
        latent_in, latent_out: into the width in which the chosen experts work, and out of it; None: it is the model's.
        is_weighted_before: whether what an expert is given is multiplied by its score; else what it gives.
    """

    router: Router
    experts: Experts
    shared: DenseWeights | None = None
    shared_gate: Linear | None = None
    latent_in: Linear | None = None
    latent_out: Linear | None = None
    is_weighted_before: bool = False

    @property
    def out(self) -> None:
        """See FeedForward: each expert has a product of its own."""
        return None

    @property
    def step_bytes(self) -> int:
        """See FeedForward."""
        return self.experts.into.size_bytes * self.router.used // self.experts.into.count

    def inner(self, x: Tensor, norm: Norm | None, context: LayerContext, then: Linear | None = None) -> Tensor:
        """Compute this process's part of the sum over a token's experts, [B, T, hidden]."""
        return self._sum(x, norm, context, None)

    def add_to(self, x: Tensor, norm: Norm | None, context: LayerContext) -> Tensor:
        """Add the sum over a token's experts, which are all here, to x, [B, T, hidden], in place; returns x."""
        return self._sum(x, norm, context, x.view(-1, x.shape[-1]))

    def _sum(self, x: Tensor, norm: Norm | None, context: LayerContext, residual: Tensor | None) -> Tensor:
        ops, shape = context.ops, x.shape
        if norm and (self.is_weighted_before or not (ops.has_norms_in_products and x.shape[:2] == (1, 1))):
            x, norm = ops.norm(x, norm), None
        rows, first = x.reshape(-1, x.shape[-1]), norm
        chosen, counts = ops.choose_experts(self.router, rows, norm)
        if self.experts.first is not None:
            chosen = self.experts.numbered(chosen)
        if self.latent_in:
            rows, first = ops.linear(self.latent_in, rows, norm), None
        inner = self.shared.inner(x, norm, context) if self.shared else None  # before x may be overwritten
        if inner is not None and self.shared_gate:
            inner *= torch.sigmoid(ops.linear(self.shared_gate, x, norm))
        to = None if self.latent_out else residual
        if self.is_weighted_before:
            mixed = self._run_weighted(ops, rows, chosen, counts)
            mixed = mixed if to is None else to.add_(mixed)
        else:
            mixed = ops.run_experts(self.experts, rows, chosen, counts, first, to)
        mixed = (ops.linear(self.latent_out, mixed, residual=residual) if self.latent_out else mixed).view(shape)
        return mixed if self.shared is None or inner is None else ops.linear(self.shared.out, inner, residual=mixed)

    def _run_weighted(self, ops: Ops, rows: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        """Run experts that are given a token times its score: to them, each is a token that uses one expert."""
        given = (rows[:, None] * counts[..., None]).to(rows.dtype).flatten(0, 1)
        found = ops.run_experts(self.experts, given, chosen.view(-1, 1), torch.ones_like(counts).view(-1, 1))
        return found.view(*chosen.shape, -1).sum(1)
