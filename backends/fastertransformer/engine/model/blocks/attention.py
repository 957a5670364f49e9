"""Self-attention in which several heads of queries share one head of keys and values.

B: rows of a call; T: tokens of this call; H, Hkv: heads of queries, and of keys and values, in this process; D: size of
a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...cache.sizing import Entry
from ...ops.linear import HeadNorms, Linear, Norm
from .context import LayerContext


class SelfAttention(Protocol):
    """What a layer asks of the block that looks at the tokens before.

    Attributes:
        out: the row-parallel product that leads back into the residual stream.
        entry: what the layer's cache keeps of a token.
    """

    @property
    def out(self) -> Linear:
        """See above."""

    @property
    def entry(self) -> Entry:
        """See above."""

    def inner(self, x: Tensor, norm: Norm | None, context: LayerContext, kv: Tensor) -> Tensor:
        """Compute what ``out`` is multiplied by, for this process's heads, of [B, T, hidden], normed first.

        ``kv`` is the layer's cache.
        """


@dataclass(frozen=True)
class GroupedWeights:
    """Attention with grouped queries.

    Attributes:
        qkv: hidden -> (heads + 2 * kv_heads) * head_size: all q, then all k, then all v. With gates, behind each q.
        out: heads * head_size -> hidden.
        size_per_head: width of a head.
        group: heads of queries that share a head of keys and values.
        query_norm, key_norm: of each head's query and key before they are rotated; None: there is none.
        norms_together: whether they are of all heads together, those of other processes too.
        ia3: what k and v, and after them others, are multiplied with, [tasks, ...] each; None: nothing is.
        sinks: fp32 [heads], see positions.Attend; None: there is none.
        is_gated: whether what a head gives is multiplied by a sigmoid of its gate.
    """

    qkv: Linear
    out: Linear
    size_per_head: int
    group: int = 1
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    norms_together: bool = False
    ia3: tuple[Tensor, ...] | None = None
    sinks: Tensor | None = None
    is_gated: bool = False

    @property
    def entry(self) -> Entry:
        """See SelfAttention."""
        return Entry(len(self.qkv.weight) // self.size_per_head // (self._queries + 2), self.size_per_head)

    @property
    def _queries(self) -> int:
        """Queries of a group, and their gates."""
        return self.group * (1 + self.is_gated)

    def inner(self, x: Tensor, norm: Norm | None, context: LayerContext, kv: Tensor) -> Tensor:
        """See SelfAttention; [B, T, hidden] -> [B, T, H * D]."""
        q, k, v = self._split(context.ops.linear(self.qkv, x, norm))
        if not self.is_gated:
            return join_heads(self._attend(q, k, v, context, kv))
        q, gate = q.view(len(q), -1, 2, *q.shape[2:]).unbind(2)
        return join_heads(self._attend(q, k, v, context, kv)) * join_heads(gate).sigmoid_()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext, kv: Tensor) -> Tensor:
        """Norm, and attend; the result has q's shape."""
        ops = context.ops
        if self.query_norm and self.key_norm:
            if self.norms_together:
                q, k = _norm_together(context, (q, self.query_norm), (k, self.key_norm))
                return context.attend(q, k, v, kv, sinks=self.sinks)
            if self.query_norm.is_rms and not self.ia3:
                return context.attend(q, k, v, kv, HeadNorms(self.query_norm, self.key_norm), self.sinks)
            q, k = ops.norm(q, self.query_norm), ops.norm(k, self.key_norm)
        k, v = scale_by_task(k, self.ia3, 0, context.tasks), scale_by_task(v, self.ia3, 1, context.tasks)
        return context.attend(q, k, v, kv, sinks=self.sinks)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, (H + 2 * Hkv) * D] -> [B, H, T, D], with gates twice as many heads, and twice [B, Hkv, T, D]."""
        heads = x.view(*x.shape[:2], -1, self.size_per_head).transpose(1, 2)
        kv_heads = heads.shape[1] // (self._queries + 2)
        q, k, v = torch.split(heads, [self._queries * kv_heads, kv_heads, kv_heads], 1)
        return q, k, v


def _norm_together(context: LayerContext, *pairs: tuple[Tensor, Norm]) -> Iterator[Tensor]:
    """Norm the heads of a token together, of each [B, H, T, D] those of all processes that share the layer."""
    wide, sizes = [join_heads(x) for x, _ in pairs], [x.shape[-1] for x, _ in pairs]
    if context.comm.is_split:
        # Copies of a head of keys count as often as there are, in the sum and in the number alike.
        squares = torch.stack([x.float().square().mean(-1, keepdim=True) for x in wide])
        for x, square, (_, norm), size in zip(wide, context.comm.average(squares), pairs, sizes, strict=True):
            normed = x.float() * torch.rsqrt(square + norm.eps) * norm.weight
            yield split_heads(normed.to(x.dtype), 1, size)[0]
    else:
        for x, (_, norm), size in zip(wide, pairs, sizes, strict=True):
            yield split_heads(context.ops.norm(x, norm), 1, size)[0]


def split_heads(x: Tensor, parts: int, size: int) -> tuple[Tensor, ...]:
    """[B, T, parts * H * D] -> [B, H, T, D] each."""
    return x.view(*x.shape[:2], parts, -1, size).permute(2, 0, 3, 1, 4).unbind()


def join_heads(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H * D]."""
    return x.transpose(1, 2).flatten(2)


def scale_by_task(x: Tensor, ia3: tuple[Tensor, ...] | None, index: int, tasks: Tensor | None) -> Tensor:
    """Scale keys or values, [B, H, T, D], by the IA3 vectors of their tokens' tasks, [B, T]."""
    if ia3 is None or tasks is None:
        return x
    return x * ia3[index][tasks].view(*tasks.shape, -1, x.shape[-1]).transpose(1, 2)
