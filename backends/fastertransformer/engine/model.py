"""The GPT network and its KV cache.

B: rows of the batch; T: tokens of this call; S: cache slots in use; H: heads (this process's, where several share the
layers); D: size of a head; V: vocabulary.

Rows of different length are padded on the right. Attention is causal, so no real token ever sees the padding, and what
the padding left in the cache is overwritten or masked: a row computes the same numbers whatever else is in the batch.
The slot of a token in the cache is its position in its own row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from .config import GptConfig
from .weights import GptWeights, LayerWeights


class KvCache:
    """Keys and values of one batch, in memory that the next batch reuses.

    Args:
        config: dimensions.
        dtype: number format of keys and values.
        device: where they live.
        layers: that this process holds; None for all.
        head_num: of each layer that this process holds; None for all.
    """

    def __init__(
        self,
        config: GptConfig,
        dtype: torch.dtype,
        device: torch.device,
        layers: int | None = None,
        head_num: int | None = None,
    ) -> None:
        self._layers = config.num_layer if layers is None else layers
        self._head_num, self._size_per_head = head_num or config.head_num, config.size_per_head
        # Zeros, not empty: a masked slot is multiplied by 0, and 0 times a leftover NaN is NaN.
        self._memory = torch.zeros(0, dtype=dtype, device=device)

    def slots(self, rows: int, length: int) -> Tensor:
        """Give [layers, 2 (k, v), rows, H, length, D]; the content is left over from the last batch."""
        shape = (self._layers, 2, rows, self._head_num, length, self._size_per_head)
        size = torch.Size(shape).numel()
        if size > self._memory.numel():
            dtype, device = self._memory.dtype, self._memory.device
            self._memory = torch.zeros(0, dtype=dtype, device=device)  # frees the old block before the new one
            self._memory = torch.zeros(size, dtype=dtype, device=device)
        return self._memory[:size].view(shape)


class Links:
    """Where the network goes on in other processes; this is the case that it does not. See parallel.ProcessLinks."""

    def enter(self, embed: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Give what the first layer here works on, [*shape, hidden]: the embedding, or an earlier process's result."""
        return embed()

    def reduce(self, part: Tensor) -> Tensor:
        """Sum the parts of a matrix product, each of which a process has computed with its rows of the matrix."""
        return part

    def leave(self, x: Tensor) -> Tensor:
        """Pass on what the last layer here has made; gives the last layer of all's where this process predicts."""
        return x


class Gpt:
    """A GPT with learned positions, pre-LayerNorm and tanh-GELU, or one process's part of it.

    Args:
        config: dimensions of the whole.
        weights: tensors.
        links: to the other parts.
    """

    def __init__(self, config: GptConfig, weights: GptWeights, links: Links | None = None) -> None:
        self.config = config
        self.weights = weights
        self._links = links or Links()

    def prefill(self, ids: Tensor, cache: Tensor) -> Tensor:
        """Run whole inputs from position 0.

        Args:
            ids: [B, T] token ids, padded on the right with any legal id.
            cache: [layers, 2, B, H, >=T, D]; slots 0..T-1 are written.

        Returns:
            [B, T, hidden], before the final norm.
        """
        batch, length = ids.shape
        positions = torch.arange(length, device=ids.device)
        x = self._links.enter(lambda: self._embed(ids, positions), (batch, length))  # [B, T, hidden]
        for layer, slots in zip(self.weights.layers, cache, strict=True):
            qkv = self._qkv(layer, x).view(batch, length, 3, -1, self.config.size_per_head)
            qkv = qkv.permute(2, 0, 3, 1, 4)  # [3, B, H, T, D]
            slots[:, :, :, :length] = qkv[1:]
            attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)  # [B, H, T, D]
            x = self._finish_layer(layer, x, attended.transpose(1, 2).reshape(batch, length, -1))
        return self._links.leave(x)

    def decode(self, ids: Tensor, positions: Tensor, cache: Tensor, longest: int, is_uniform: bool) -> Tensor:
        """Run one token of every row.

        Args:
            ids: [B] token ids.
            positions: [B], each token's position in its row.
            cache: [layers, 2, B, H, >=longest, D]; slot positions[b] of row b is written.
            longest: 1 + the largest position, known on the host so that the device need not be asked.
            is_uniform: whether all positions are equal: then no mask is needed.

        Returns:
            [B, hidden], before the final norm.
        """
        batch = ids.shape[0]
        rows = torch.arange(batch, device=ids.device)
        mask = None
        if not is_uniform:
            mask = (torch.arange(longest, device=ids.device) <= positions[:, None])[:, None, None]  # [B, 1, 1, S]
        x = self._links.enter(lambda: self._embed(ids, positions), (batch,))  # [B, hidden]
        for layer, slots in zip(self.weights.layers, cache, strict=True):
            qkv = self._qkv(layer, x).view(batch, 3, -1, self.config.size_per_head)
            if is_uniform:
                slots[:, :, :, longest - 1] = qkv[:, 1:].transpose(0, 1)
            else:
                slots[:, rows, :, positions] = qkv[:, 1:]  # indexed axes come first: [B, 2, H, D]
            keys, values = slots[0, :, :, :longest], slots[1, :, :, :longest]  # [B, H, S, D]
            attended = F.scaled_dot_product_attention(qkv[:, 0].unsqueeze(2), keys, values, attn_mask=mask)
            x = self._finish_layer(layer, x, attended.reshape(batch, -1))
        return self._links.leave(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., hidden] -> fp32 [..., V]."""
        assert self.weights.head is not None, "this process does not predict"
        return self.weights.head.in_fp32(self._norm(hidden, self.weights.final_norm))

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        tokens = F.embedding(ids, self.weights.token_embedding)
        where = F.embedding(positions, self.weights.position_embedding)
        return tokens.to(where.dtype) + where

    def _qkv(self, layer: LayerWeights, x: Tensor) -> Tensor:
        return layer.qkv(self._norm(x, layer.input_norm))  # [..., 3 * H * D]

    def _finish_layer(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """Add attention's output and the MLP to the residual stream, in place: all arguments are [..., hidden]."""
        x += self._links.reduce(layer.attention_out(attended))
        inner = F.gelu(layer.mlp_in(self._norm(x, layer.post_norm)), approximate="tanh")
        x += self._links.reduce(layer.mlp_out(inner))
        return x

    def _norm(self, x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *norm, eps=self.config.layernorm_eps)
