"""The operations of a call some of whose tokens have adapters; calls without any take the others, and lose nothing."""

from __future__ import annotations

from torch import Tensor

from .adapted_rows import AdaptedRows
from .experts import Experts
from .latent_attention import AdaptedUp, LatentUp
from .linear import ACTIVATIONS, Linear, Norm
from .ops import Ops
from .routing import Router


class AdaptedOps(Ops):
    """Operations that add what adapters do; see Ops for what each method does."""

    def __init__(self, ops: Ops, rows: AdaptedRows) -> None:
        self._ops, self._rows, self.latent = ops, rows, ops.latent

    def of_tokens(self, tokens: slice) -> Ops:
        return self if tokens == slice(None) else AdaptedOps(self._ops, self._rows.part(tokens))

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self._ops.norm(x, norm)

    def linear(
        self,
        linear: Linear,
        x: Tensor,
        norm: Norm | None = None,
        activation: str = "",
        residual: Tensor | None = None,
    ) -> Tensor:
        if not linear.low_rank:
            return self._ops.linear(linear, x, norm, activation, residual)
        x = self._ops.norm(x, norm) if norm else x
        if (whole := self._rows.multiply(self._ops.linear, linear, x, activation, residual)) is not None:
            return whole
        y = self._ops.linear(linear, x, residual=None if activation else residual)
        self._rows.add(y, x, linear.low_rank)
        if not activation:
            return y
        y = ACTIVATIONS[activation](y)
        return y if residual is None else residual.add_(y)

    def gated_linear(
        self,
        linear: Linear,
        gate: Linear,
        x: Tensor,
        norm: Norm | None = None,
        activation: str = "",
        then: Linear | None = None,
    ) -> Tensor:
        x = self._ops.norm(x, norm) if norm else x
        if linear.joined:
            gated = self._rows.multiply(self._ops.linear, linear.joined, x, activation, is_gated=True)
            if gated is not None:
                return gated
            return self._ops.gate_halves(self.linear(linear.joined, x), activation)
        return self.linear(linear, x, activation=activation).mul_(self.linear(gate, x))

    def partial_linear(self, linear: Linear, x: Tensor) -> Tensor:
        y = self._ops.partial_linear(linear, x)
        if linear.low_rank:
            self._rows.add(y, x, linear.low_rank)
        return y

    def linear_fp32(self, linear: Linear, x: Tensor, norm: Norm | None = None, out: Tensor | None = None) -> Tensor:
        if not linear.low_rank:
            return self._ops.linear_fp32(linear, x, norm, out)
        x = self._ops.norm(x, norm) if norm else x
        y = self._ops.linear_fp32(linear, x, None, out)
        self._rows.add(y, x, linear.low_rank)
        return y

    def latent_up(self, up: LatentUp) -> LatentUp:
        return AdaptedUp(up, self._rows) if up.low_rank else up

    def choose_experts(self, router: Router, x: Tensor, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
        if not router.linear.low_rank:
            return self._ops.choose_experts(router, x, norm)
        return self._ops.choose_by(router, self.linear_fp32(router.linear, x, norm))

    def run_experts(
        self,
        layer: Experts,
        x: Tensor,
        chosen: Tensor,
        counts: Tensor,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return self._ops.run_experts(layer, x, chosen, counts, norm, residual)
