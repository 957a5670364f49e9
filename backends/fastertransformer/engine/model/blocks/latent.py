"""Self-attention whose keys and values of all heads are made from one narrow vector of each token.

B: rows of a call; T: tokens of this call; H: heads in this process. The other letters stand in ops/latent_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...cache.sizing import Entry
from ...ops.latent_attention import LatentUp
from ...ops.linear import Linear, Norm
from .attention import join_heads
from .context import LayerContext


@dataclass(frozen=True)
class LatentWeights:
    """Latent attention.

    Attributes:
        down: hidden -> what queries are made from, or the queries themselves; then the latent vector, N, and what is
            rotated of the keys, R.
        query_norm, query_up: of the narrow vector that queries are made from, and what makes H * (P + R) of it; None:
            ``down`` does.
        up: what makes keys and values of the latent vector. It is as wide as it is computed with in any format of
            weights: parts of it are multiplied to queries, and to what attention gives.
        out: H * V -> hidden.
        rotated_size: R.
    """

    down: Linear
    query_norm: Norm | None
    query_up: Linear | None
    up: LatentUp
    out: Linear
    rotated_size: int

    @property
    def entry(self) -> Entry:
        """See SelfAttention: one head for all ranks."""
        return Entry(1, self.rotated_size + self.up.matrix.shape[2], parts=1)

    def inner(self, x: Tensor, norm: Norm | None, context: LayerContext, kv: Tensor) -> Tensor:
        """See SelfAttention; [B, T, hidden] -> [B, T, H * V]."""
        made, width = context.ops.linear(self.down, x, norm), self.entry.size_per_head
        query, narrow = made[..., :-width], made[..., -width:]
        if self.query_up:
            query = context.ops.linear(self.query_up, query, self.query_norm)
        heads = query.reshape(*x.shape[:2], -1, self.up.plain_size + self.rotated_size).transpose(1, 2)
        return join_heads(context.attend(heads, narrow, context.ops.latent_up(self.up), kv))
