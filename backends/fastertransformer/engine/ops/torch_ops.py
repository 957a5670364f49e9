"""Every operation in torch: for a CPU, and for a GPU on which Triton cannot compile."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..cache.kv_cache import PAGE, KvCache
from ..model.linear import ACTIVATIONS, Linear, Norm
from ..model.packed_rows import Rows
from ..model.positions import AttentionSpec
from ..sampling import sampling
from ..sampling.sampling import argmax
from .base import Attend, CrossAttend, Ops
from .torch_attention import (
    CrossAttention,
    DecodeAttention,
    ExtendAttention,
    PrefillAttention,
    RowAttention,
    write_entries,
)


class TorchOps(Ops):
    """See Ops for what each method does.

    Args:
        device: of the network.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_cublas = device, device.type == "cuda"

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See Ops."""
        if norm.is_rms:
            return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)

    def linear(
        self,
        linear: Linear,
        x: Tensor,
        norm: Norm | None = None,
        activation: str = "",
        residual: Tensor | None = None,
    ) -> Tensor:
        """See Ops."""
        x = self.norm(x, norm) if norm else x
        if self._has_cublas and x.dtype != torch.float32:
            return self._by_cublas(linear, x, activation, residual)
        y = ACTIVATIONS[activation](linear(x))
        if residual is None:
            return y
        residual += y
        return residual

    def _by_cublas(self, linear: Linear, x: Tensor, activation: str, residual: Tensor | None) -> Tensor:
        """Compute linear; cuBLASLt applies gelu or relu, or adds the residual, before it rounds."""
        flat, matrix, outputs = x.reshape(-1, x.shape[-1]), self._matrix(linear), len(linear.weight)
        if residual is not None and linear.bias is None and not activation:
            rows = residual.view(-1, outputs)
            torch.addmm(rows, flat, matrix.T, out=rows)
            return residual
        if activation in ("gelu", "relu"):
            y = torch._addmm_activation(linear.bias_or_zeros(x), flat, matrix.T, use_gelu=activation == "gelu")
        else:
            y = ACTIVATIONS[activation](F.linear(flat, matrix, linear.bias))
        y = y.view(*x.shape[:-1], outputs)
        if residual is None:
            return y
        residual += y
        return residual

    def _matrix(self, linear: Linear) -> Tensor:
        """Give the weight in x's type, [out, in]."""
        return linear.weight if linear.scales is None else linear.weight * linear.scales[:, None]

    def partial_linear(self, linear: Linear, x: Tensor) -> Tensor:
        """See Ops."""
        return linear(x)

    def linear_fp32(self, linear: Linear, x: Tensor, norm: Norm | None = None) -> Tensor:
        """See Ops."""
        x = self.norm(x, norm) if norm else x
        if linear.weight.dtype == torch.float32:
            return linear(x.float())
        flat = torch.mm(x.reshape(-1, x.shape[-1]), self._matrix(linear).T, out_dtype=torch.float32)
        y = flat.view(*x.shape[:-1], -1)
        return y if linear.bias is None else y + linear.bias

    def embed(self, ids: Tensor, positions: Tensor, tokens: Tensor, table: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See Ops."""
        x = F.embedding(ids, tokens).to(dtype)
        return x if table is None else x + F.embedding(positions.clamp(max=len(table) - 1), table)

    def argmax_step(self, logits: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """See Ops."""
        tokens = argmax(logits)
        ids.copy_(tokens.clamp(min=0))
        positions += 1
        return tokens

    def draw_tokens(
        self, logits: Tensor, rows: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor, largest: int, is_narrow: bool
    ) -> Tensor:
        """See Ops."""
        logits = logits[rows]
        if not is_narrow:
            return sampling.draw(sampling.keep_top_p(sampling.keep_top_k(logits, top_k, largest), top_p), uniform)
        values, ids = sampling.narrow_to_top_k(logits, top_k, largest)
        return ids.gather(1, sampling.draw(sampling.keep_top_p(values, top_p), uniform)[:, None])[:, 0]

    def kv_write(self, memory: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """See Ops."""
        write_entries(memory, pages * PAGE + offsets, k.transpose(0, 1), v.transpose(0, 1))

    def encoder_attention(self, rows: Rows, spec: AttentionSpec, like: Tensor, scores: list[Tensor] | None) -> Attend:
        """See Ops."""
        return RowAttention(rows, spec, like, is_causal=False, scores=scores)

    def prefill_attention(self, cache: KvCache, rows: Rows, spec: AttentionSpec, like: Tensor) -> Attend:
        """See Ops."""
        attend = RowAttention(rows, spec, like, is_causal=True)
        return PrefillAttention(cache, rows, spec.rotation(rows.positions[None], like), self.kv_write, attend)

    def extend_attention(self, cache: KvCache, rows: Rows, longest: int, spec: AttentionSpec, like: Tensor) -> Attend:
        """See Ops."""
        return ExtendAttention(cache, rows, longest, spec, like, self.kv_write)

    def decode_attention(
        self, positions: Tensor, tables: Tensor, windows: Tensor, spec: AttentionSpec, like: Tensor
    ) -> Attend:
        """See Ops."""
        return DecodeAttention(positions, tables, windows, spec, like)

    def cross_attention(self, tables: Tensor, lengths: Tensor, scale: float) -> CrossAttend:
        """See Ops."""
        return CrossAttention(tables, lengths, scale)
