"""The network: token ids in, hidden states and logits out, keys and values kept in a cache.

B: rows of a call; T: tokens of this call; S: cells of the cache in use; H: heads (this process's, where several share
the layers); D: size of a head; V: vocabulary.

A row is one sequence. Its keys and values live in one slot of the cache (cache.py), the token at position p in the
slot's cell p % window: so a slot remembers the last ``window`` tokens. Rows of different length are padded on the
right. What padding leaves behind is overwritten or masked: a row computes the same numbers whatever else is in the
batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from .cache import KvCache
from .config import GptConfig
from .weights import GptWeights, LayerWeights

Slots = Tensor | slice  # which slot each row has: [B], or neighbours in order, whose memory is read where it is


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


class Network:
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

    def extend(
        self,
        ids: Tensor,
        starts: Tensor | None,
        lengths: Tensor,
        slots: Slots,
        cache: KvCache,
        longest: int,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """Run several tokens of every row.

        Args:
            ids: [B, T] token ids, padded on the right with any legal id.
            starts: [B] position of each row's first token, which attends to everything cached before it; None where
                all are new rows: that is faster.
            lengths: [B] how many of a row's T tokens are real; at least 1.
            slots: of each row.
            cache: where keys and values go; T is at most the window of a row that has one.
            longest: the most cells that a row has in use afterwards, min(starts + lengths, window), known on the host
                so that the device need not be asked.
            embeddings: [B, T, hidden] in place of the token embeddings; a token whose first number is NaN keeps its
                own.

        Returns:
            [B, T, hidden], before the final norm; what stands behind a row's length means nothing.
        """
        batch, length = ids.shape
        steps = torch.arange(length, device=ids.device)
        positions = steps if starts is None else starts[:, None] + steps  # [T] or [B, T]
        past = None if starts is None else _Past(starts, lengths, length, cache.windows[slots], longest)
        x = self._links.enter(lambda: self._embed(ids, positions, embeddings), (batch, length))  # [B, T, hidden]
        for layer, memory in zip(self.weights.layers, cache.memory, strict=True):
            q, k, v = self._qkv(layer, x).view(batch, length, 3, -1, self.config.size_per_head).permute(2, 0, 3, 1, 4)
            if past is None:
                memory[0, slots, :, :length], memory[1, slots, :, :length] = k, v
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, D]
            else:
                keys = torch.cat((memory[0, slots, :, :longest], k), 2)  # [B, H, S + T, D]
                values = torch.cat((memory[1, slots, :, :longest], v), 2)
                attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=past.mask)
                past.write(torch.stack((k, v)), memory, slots)
            x = self._finish_layer(layer, x, attended.transpose(1, 2).reshape(batch, length, -1))
        return self._links.leave(x)

    def decode(self, ids: Tensor, positions: Tensor, slots: Slots, cache: KvCache, longest: int) -> Tensor:
        """Run one token of every row.

        Args:
            ids: [B] token ids.
            positions: [B], each token's position in its row.
            slots: of each row.
            cache: holds the keys and values of the tokens before.
            longest: the most cells that a row has in use afterwards, min(position + 1, window), known on the host.

        Returns:
            [B, hidden], before the final norm.
        """
        batch, windows = ids.shape[0], cache.windows[slots]
        targets, cells = _indices(slots, ids), positions % windows
        mask = None
        if batch > 1:  # a row that is alone fills all cells in use
            in_use = torch.arange(longest, device=ids.device) < torch.minimum(positions + 1, windows)[:, None]
            mask = in_use[:, None, None]  # [B, 1, 1, S]
        x = self._links.enter(lambda: self._embed(ids, positions, None), (batch,))  # [B, hidden]
        for layer, memory in zip(self.weights.layers, cache.memory, strict=True):
            qkv = self._qkv(layer, x).view(batch, 3, -1, self.config.size_per_head)
            memory[:, targets, :, cells] = qkv[:, 1:]  # indexed axes come first: [B, 2, H, D]
            keys, values = memory[0, slots, :, :longest], memory[1, slots, :, :longest]  # [B, H, S, D]
            attended = F.scaled_dot_product_attention(qkv[:, 0].unsqueeze(2), keys, values, attn_mask=mask)
            x = self._finish_layer(layer, x, attended.reshape(batch, -1))
        return self._links.leave(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., hidden] -> fp32 [..., V]."""
        assert self.weights.head is not None, "this process does not predict"
        return self.weights.head.in_fp32(self._norm(hidden, self.weights.final_norm))

    def _embed(self, ids: Tensor, positions: Tensor, embeddings: Tensor | None) -> Tensor:
        tokens = F.embedding(ids, self.weights.token_embedding)
        if embeddings is not None:
            tokens = torch.where(embeddings[..., :1].isnan(), tokens, embeddings.to(tokens.dtype))
        # Padding may stand behind the last position.
        where = F.embedding(positions.clamp(max=self.config.max_pos_seq_len - 1), self.weights.position_embedding)
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


class _Past:
    """Rows that go on from what their slots hold: which cells they see, and which they write.

    Args:
        starts, lengths: [B], see Network.extend.
        length: T.
        windows: [B] of the rows' slots.
        longest: cells of a slot to look at, S.
    """

    def __init__(self, starts: Tensor, lengths: Tensor, length: int, windows: Tensor, longest: int) -> None:
        steps = torch.arange(length, device=starts.device)
        held = cell_positions(starts - 1, windows, longest)  # [B, S]
        too_old = starts[:, None] + steps - windows[:, None]  # [B, T]
        sees_past = (held >= 0)[:, None] & (held[:, None] > too_old[:, :, None])  # [B, T, S]
        sees_new = (steps <= steps[:, None]).expand(len(starts), -1, -1)  # [B, T, T]
        self.mask = torch.cat((sees_past, sees_new), 2)[:, None]  # [B, 1, T, S + T]
        # Padding writes what the last real token writes, to the same place.
        self._sources = torch.minimum(steps, lengths[:, None] - 1)  # [B, T]
        self._cells = (starts[:, None] + self._sources) % windows[:, None]  # [B, T]

    def write(self, new: Tensor, memory: Tensor, slots: Slots) -> None:
        """Put keys and values, [2, B, H, T, D], into the slots of [2, slots, H, capacity, D]."""
        rows = torch.arange(new.shape[1], device=new.device)[:, None]
        targets = _indices(slots, self._cells)[:, None]
        memory[:, targets, :, self._cells] = new[:, rows, :, self._sources]  # indexed axes come first: [B, T, 2, H, D]


def _indices(slots: Slots, rows: Tensor) -> Tensor:
    """Give the slots of [B, ...] rows as [B]."""
    if isinstance(slots, Tensor):
        return slots
    return torch.arange(slots.start or 0, slots.stop, device=rows.device)


def cell_positions(last: Tensor, windows: Tensor, cells: int) -> Tensor:
    """Say which position each of the first cells holds once the one at ``last`` is written.

    Args:
        last: [B].
        windows: [B] of the rows' slots.
        cells: S.

    Returns:
        [B, S]; negative: none.
    """
    index, window = torch.arange(cells, device=last.device), windows[:, None]
    held = last[:, None] - (last[:, None] - index) % window
    return held.masked_fill(index >= window, -1)
