"""The operations on a CPU that has kernels in C: what comes before and behind a product is part of it."""

from __future__ import annotations

import torch
from torch import Tensor

from .cached_attention import decode_rows
from .host.attention import DecodeAttention, can_attend
from .host.compiled import host_kernels
from .host.panels import knows
from .linear import HeadNorms, Linear, Norm
from .ops import Ops
from .positions import Attend, AttentionSpec


class HostOps(Ops):
    """See Ops for what each method does."""

    def linear(
        self,
        linear: Linear,
        x: Tensor,
        norm: Norm | None = None,
        activation: str = "",
        residual: Tensor | None = None,
    ) -> Tensor:
        is_added = residual is not None
        if not linear.panels or x.dtype != torch.float32 or not knows(activation) or (is_added and activation):
            return super().linear(linear, x, norm, activation, residual)
        x, fused = self._fused(x, norm)
        return linear.panels.multiply(x, fused, activation, out=residual, adds=is_added)

    def gated_linear(
        self,
        linear: Linear,
        gate: Linear,
        x: Tensor,
        norm: Norm | None = None,
        activation: str = "",
        then: Linear | None = None,
    ) -> Tensor:
        has_kernels = linear.panels and gate.panels and linear.panels.is_like(gate.panels)
        if not has_kernels or x.dtype != torch.float32 or not knows(activation):
            return super().gated_linear(linear, gate, x, norm, activation)
        assert linear.panels
        x, fused = self._fused(x, norm)
        return linear.panels.multiply(x, fused, activation, gate.panels)

    def linear_fp32(self, linear: Linear, x: Tensor, norm: Norm | None = None, out: Tensor | None = None) -> Tensor:
        if not linear.panels or x.dtype != torch.float32:
            return super().linear_fp32(linear, x, norm, out)
        x, fused = self._fused(x, norm)
        return linear.panels.multiply(x, fused, out=out)

    def decode_attention(
        self, positions: Tensor, tables: Tensor, windows: Tensor, spec: AttentionSpec, like: Tensor
    ) -> Attend:
        kernels = host_kernels()
        by_torch: list[Attend] = []  # prepared where a layer needs it
        ours = (
            DecodeAttention(kernels, positions, tables, windows, spec, like)
            if kernels and can_attend(spec, like)
            else None
        )

        def attend(
            q: Tensor, k: Tensor, v: Tensor, kv: Tensor, norms: HeadNorms | None = None, sinks: Tensor | None = None
        ) -> Tensor:
            if ours and sinks is None and len(kv) == 2 and kv.dtype == q.dtype == torch.float32:
                q, k = (self.norm(q, norms.query), self.norm(k, norms.key)) if norms else (q, k)
                return ours.attend(q, k, v, kv)
            if not by_torch:
                by_torch.append(decode_rows(positions, tables, windows, spec, like, self.norm))
            return by_torch[0](q, k, v, kv, norms, sinks)

        return attend

    def _fused(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, tuple[Tensor, Tensor | None, float, bool] | None]:
        """Return a product's input and its norm, which is done before where its weight has another type."""
        if norm is None:
            return x, None
        if norm.weight.dtype != torch.float32:
            return self.norm(x, norm), None
        return x, (norm.weight, norm.bias, norm.eps, norm.is_rms)
