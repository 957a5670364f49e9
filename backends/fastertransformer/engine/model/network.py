"""The network: token ids in, hidden states and logits out, keys and values kept in a cache.

One class for every family: a stack of layers that config.ini's keys shape (config.Stack), of which an encoder-decoder
has two. B: rows of a call; T: tokens of all of them together; H: heads (this process's, where several share the
layers); D: size of a head; V: vocabulary.

A row is one sequence, or one beam of one. Its keys and values live in one slot of the cache; see pages.py. Rows of
different length stand one behind the other, so nothing is padded: a row computes the same numbers whatever else is in
the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..cache.kv_cache import PAGE, KvCache, put
from ..ops.kernels import can_run_on
from ..parallel.comm import Comm
from .attention import ContinuedRows, KeptSource, Manner, NewRows, NextTokens, WholeRows
from .config import ModelConfig, Stack
from .layers import Call, adapted, run_layer, split
from .layouts import ModelWeights, StackWeights
from .linear import Norm
from .packed_rows import Rows
from .positions import Alibi, Bias, Relative, Rotary


class Network:
    """A network, or one process's part of it.

    Args:
        config: of the whole.
        weights: tensors.
        comm: with the processes that hold the other parts.

    Attributes:
        config, weights, comm: those.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, comm: Comm | None = None) -> None:
        self.config = config
        self.weights = weights
        self.comm = comm or Comm()
        self._like = weights.like  # a tensor on this process's device, in the format of keys and values
        self._manner = _manner(config, weights.decoder, is_both_ways=False)
        self._encoder_manner = _manner(config.encoder or config, weights.encoder, is_both_ways=True)

    def extend(
        self,
        rows: Rows,
        cache: KvCache,
        embeddings: Tensor | None = None,
        longest: int = 0,
    ) -> Tensor:
        """Run several tokens of every row.

        Args:
            rows: those; none has more tokens than its window.
            cache: where keys and values go.
            embeddings: [T, hidden] in place of the token embeddings; a token whose first number is NaN keeps its own.
            longest: at least the entries of the cache that a row has afterwards; 0: all are new rows, which is faster.

        Returns:
            [T, hidden], before the final norm.
        """
        how = self._manner, self._like
        attend = ContinuedRows(cache, rows, longest, *how) if longest else NewRows(cache, rows, *how)
        x = self._enter(rows, embeddings)
        return self.comm.send_output(self._decoder(x, attend, rows.slots, cache))[0]

    def decode(self, ids: Tensor, positions: Tensor, slots: Tensor | slice, cache: KvCache) -> Tensor:
        """Run one token of every row.

        Args:
            ids: [B] token ids.
            positions: [B], each token's position in its row.
            slots: of each row; a slice is faster than indices.
            cache: holds the keys and values of the tokens before.

        Returns:
            [B, hidden], before the final norm.
        """
        attend = NextTokens(positions, cache.tables[slots], cache.windows[slots], self._manner, self._like)
        x = self.comm.recv_input(lambda: self._embed_next(ids, positions), (len(ids), 1))  # [B, 1, hidden]
        return self.comm.send_output(self._decoder(x, attend, slots, cache))[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., hidden] -> fp32 [..., V], or this process's part of the vocabulary."""
        assert self.weights.head, "this process does not predict"
        return self.weights.head.in_fp32(hidden, self._head_norm)

    @cached_property
    def _head_norm(self) -> Norm | None:
        """The norm before the head, with the factor that a tied T5 has there in its weight."""
        assert self.weights.decoder, "there is no decoder"
        norm = self.weights.decoder.final_norm
        if norm and self.config.scales_head:
            norm = replace(norm, weight=norm.weight * self.config.hidden_units**-0.5)
        return norm

    def encode(
        self,
        rows: Rows,
        cache: KvCache,
        embeddings: Tensor | None = None,
        attentions: list[Tensor] | None = None,
    ) -> Tensor:
        """Run the encoder over whole inputs, and keep what its decoder needs of them.

        Args:
            rows: those.
            cache: where keys and values go.
            embeddings: see extend.
            attentions: empty; takes what each layer attends to, fp32 [B, H, S, S], S being the longest row. None:
                nobody asks.

        Returns:
            [T, hidden], normed.
        """
        stack, weights = self.config.encoder, self.weights.encoder
        assert stack and weights, "there is no encoder"
        attend = WholeRows(rows, self._encoder_manner, self._like, attentions)
        call = Call(attend, cache.sources[1, rows.slots][None] if self.config.ia3_num_tasks else None)
        x = self._enter(rows, embeddings)
        for layer in weights.layers:
            x = run_layer(stack, layer, x, call, self.comm)
        x = self.comm.broadcast_output(self.comm.send_output(x))
        x = weights.final_norm(x) if weights.final_norm else x
        self._remember(x, rows, cache, call.tasks)
        if attentions is not None:
            attentions[:] = self.comm.gather_attentions(attentions, (len(rows.ends) - 1, rows.longest))
        return x[0]

    def _remember(self, encoded: Tensor, rows: Rows, cache: KvCache, tasks: Tensor | None) -> None:
        """Put the keys and values of what the encoder has made, [1, T, hidden], into the rows' slots."""
        if not self.weights.decoder:
            return
        places = cache.source_tables[rows.slots, rows.positions // PAGE], rows.positions % PAGE
        for layer, memory in zip(self.weights.decoder.layers, cache.memory, strict=True):
            assert layer.cross
            k, v = split(self.config, layer.cross.key_value(encoded), 2)
            k, v = adapted(k, layer.cross.ia3, 0, tasks), adapted(v, layer.cross.ia3, 1, tasks)
            put(memory, *places, k[0], v[0])

    def can_be_captured(self) -> bool:
        """Say whether extend of new rows, or encode, can do without lengths."""
        return can_run_on(self._like.device) and not self.config.ia3_num_tasks

    def _decoder(self, x: Tensor, attend: Callable[..., Tensor], slots: Tensor | slice, cache: KvCache) -> Tensor:
        """Run this process's layers of the decoder on x, [1, T, hidden] or [B, 1, hidden], whose slots these are."""
        config, weights = self.config, self.weights.decoder
        assert weights, "there is no decoder"
        call = Call(attend)
        if cache.shape.has_cross:
            lengths, tasks = cache.sources[:, slots]
            source = KeptSource(cache.source_tables[slots], lengths, config.attention_scale)
            call = Call(attend, tasks.view(x.shape[:2]) if config.ia3_num_tasks else None, source)
        for layer, memory in zip(weights.layers, cache.memory, strict=True):
            x = run_layer(config, layer, x, call, self.comm, memory)
        return x

    def _enter(self, rows: Rows, embeddings: Tensor | None) -> Tensor:
        """Give what the first layer here works on, [1, T, hidden]."""
        ids, positions = rows.ids[None], rows.positions[None]
        return self.comm.recv_input(lambda: self._embed(ids, positions, embeddings), (1, len(rows.ids)))

    def _embed_next(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[B] each -> [B, 1, hidden]; see _embed."""
        weights = self.weights
        if can_run_on(ids.device) and weights.token_embedding.dtype == self._like.dtype and not weights.embedding_norm:
            from ..ops.kernels.embedding import embed

            return embed(ids, positions, weights.token_embedding, weights.position_embedding)[:, None]
        return self._embed(ids[:, None], positions[:, None], None)

    def _embed(self, ids: Tensor, positions: Tensor, embeddings: Tensor | None) -> Tensor:
        x = F.embedding(ids, self.weights.token_embedding).to(self._like.dtype)
        if embeddings is not None:
            x = torch.where(embeddings[..., :1].isnan(), x, embeddings.to(x.dtype))
        if self.weights.position_embedding is not None:
            table = self.weights.position_embedding
            x = x + F.embedding(positions.clamp(max=len(table) - 1), table)  # padding may stand behind the last one
        return self.weights.embedding_norm(x) if self.weights.embedding_norm else x


def _manner(stack: Stack, weights: StackWeights | None, is_both_ways: bool) -> Manner:
    bias: Bias | None = None
    if weights and weights.position_bias is not None:
        table = weights.position_bias
        bias = Alibi(table) if stack.positions == "alibi" else Relative(table, is_both_ways)
    rotary = Rotary(stack.rotary_dim, stack.rotates_pairs) if stack.rotary_dim else None
    return Manner(stack.attention_scale, bias, rotary)
