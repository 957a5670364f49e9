"""The network: token ids in, hidden states and logits out, keys and values kept in a cache.

One class for every family: a stack of layers that config.ini's keys shape (config.Stack), of which an encoder-decoder
has two. B: rows of a call; T: tokens of all of them together; H: heads (this process's, where several share the
layers); D: size of a head; V: vocabulary.

A row is one sequence, or one beam of one. Its keys and values live in one slot of the cache; see kv_cache.py. Rows of
different length are packed one behind the other, so nothing is padded: a row computes the same numbers whatever else is
in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..cache.kv_cache import PAGE, KvCache
from ..cache.states import LayerState
from ..ops import choose_ops
from ..ops.adapted import AdaptedOps
from ..ops.adapted_rows import AdaptedRows
from ..ops.host.layers import HostLayers
from ..ops.latent_attention import LatentOps
from ..ops.linear import Norm
from ..ops.ops import Ops
from ..ops.packed_rows import Rows
from ..ops.positions import AttentionSpec
from ..ops.state_rows import StateRows
from ..parallel.comm import Comm
from .attention_specs import PreparedAttention, attention_spec, specs_of_layers, tempered
from .blocks.attention import scale_by_task, split_heads
from .blocks.context import LayerContext
from .config import ModelConfig
from .layers import run_layer
from .layouts import ModelWeights
from .whole_steps import whole_step

_BIASED = ("alibi", "relative")  # positions that attention adds a bias for


class Taps(NamedTuple):
    """Hidden states within a network that a head drafts from.

    Attributes:
        layers: before which they are taken; the number of layers: behind the last.
        fuse: [n, taken * hidden], side by side -> what is kept of each token.
    """

    layers: tuple[int, ...]
    fuse: Callable[[Tensor], Tensor]


class Network:
    """A network, or one process's part of it.

    Args:
        config: of the whole network.
        weights: of this process's part.
        comm: with the processes that hold the other parts; None: there are none.
        ops: operations; None: choose_ops chooses them for the device.

    Attributes:
        can_capture_decode: whether decode steps can be captured as CUDA graphs: no block of a layer reads on the host.
        can_capture: whether packed inputs can.
        can_capture_continued: whether those that continue rows can; attention with a bias reads lengths on the host.
        is_latent: whether there is latent attention.
        taps: what is kept for an EAGLE-3 head; None: none works on it. Set before the first step.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, comm: Comm | None = None, ops: Ops | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops or choose_ops(weights.like.device)
        alone = Comm(self.ops, weights.like, vocab_size=config.vocab_size, width=config.hidden_units)
        self.comm = comm or alone
        self._like = weights.like
        self._kinds, self._specs = specs_of_layers(config, weights.decoder, weights.like.device)
        self.taps: Taps | None = None
        self._no_states: list[LayerState | None] = [None] * len(self._kinds)
        encoder = config.encoder or config
        self._encoder_spec = attention_spec(encoder, weights.encoder, weights.like.device, is_both_ways=True)
        # A number of the type that is computed in, as transformers rounds Gemma's factor.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=weights.like.dtype))
        can_mix = not config.has_experts or self.ops.can_capture_experts
        self.is_latent = any(spec.is_latent for spec in self._specs.values())
        can_attend = not self.is_latent or self.ops.latent.can_capture
        self.can_capture_decode = self.ops.can_capture and can_mix and can_attend
        self.can_capture = self.can_capture_decode and not config.ia3_num_tasks
        self.can_capture_continued = self.can_capture and not config.encoder and config.positions not in _BIASED

    def extend(
        self,
        rows: Rows,
        cache: KvCache,
        embeddings: Tensor | None = None,
        longest: int = 0,
        adapted: AdaptedRows | None = None,
        state_rows: StateRows | None = None,
    ) -> Tensor:
        """Run several tokens of every row.

        Args:
            rows: packed rows; none has more tokens than its window.
            cache: is written to.
            embeddings: [T, hidden] in place of the token embeddings; a token whose first number is NaN keeps its own.
            longest: at least the entries of the cache that a row has afterwards; 0: all are new rows, which is faster.
            adapted: which adapters the tokens have; None: no token has any.
            state_rows: the rows' states; None: each row's goes on. See drafted_states.

        Returns:
            [T, hidden], before the final norm.
        """

        def prepare(spec: AttentionSpec) -> PreparedAttention:
            ops = self._attention_of(spec)
            if longest:
                attend = ops.extend_attention(cache, rows, longest, spec, self._like)
            else:
                attend = ops.prefill_attention(cache, rows, spec, self._like)
            return tempered(attend, self.config.temperature, spec, rows.positions[None])

        x = self._embed(rows, cache, embeddings)
        tapped = list[Tensor]()
        x = self.comm.send_output(self._decoder(x, prepare, rows.slots, cache, tapped, rows, adapted, state_rows))[0]
        self._keep(x, cache, rows.slots, rows.positions, tapped)
        return x

    def decode(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor | slice,
        cache: KvCache,
        adapted: AdaptedRows | None = None,
        state_rows: StateRows | None = None,
    ) -> Tensor:
        """Run one token of every row.

        Args:
            ids: [B] token ids.
            positions: [B], each token's position in its row.
            slots: of each row; a slice is faster than indices.
            cache: holds the keys and values of the tokens before, and is written to.
            adapted: see extend.
            state_rows: see extend.

        Returns:
            [B, hidden], before the final norm.
        """

        def prepare(spec: AttentionSpec) -> PreparedAttention:
            tables, windows = cache.page_tables[slots], cache.windows[slots]
            attend = self._attention_of(spec).decode_attention(positions, tables, windows, spec, self._like)
            return tempered(attend, self.config.temperature, spec, positions[:, None])

        # [B, 1, hidden]
        x = self.comm.recv_input(lambda: self._embed_next(ids, positions, slots, cache), (len(ids), 1))
        tapped = list[Tensor]()
        if adapted is None and self._whole_step and self._whole_step.can_run(cache.kv):
            x = self._whole_step.run(x, positions, cache.page_tables[slots], cache.windows[slots], cache.kv)
        else:
            x = self._decoder(x, prepare, slots, cache, tapped, None, adapted, state_rows)
        x = self.comm.send_output(x)[:, 0]
        self._keep(x, cache, slots, positions, tapped)
        return x

    def _keep(
        self, hidden: Tensor, cache: KvCache, slots: Tensor | slice, positions: Tensor, tapped: list[Tensor]
    ) -> None:
        """Keep what a predictor of further tokens works on, if there is one: hidden states, or those of the taps."""
        if self.taps:
            cache.keep(self.taps.fuse(torch.cat(tapped, -1).flatten(0, 1)), slots, positions)
        elif cache.outputs:
            cache.keep(self.normed(hidden), slots, positions)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return hidden states behind the final norm."""
        norm = self.weights.decoder and self.weights.decoder.final_norm
        return self.ops.norm(hidden, norm) if norm else hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None, adapted: AdaptedRows | None = None) -> Tensor:
        """Final norm and head: [..., hidden] -> fp32 [..., V], or this process's part of the vocabulary.

        Args:
            hidden: of the last layer.
            out: is overwritten and returned; None: a new tensor is.
            adapted: see extend.
        """
        assert self.weights.head, "this process does not predict"
        ops = AdaptedOps(self.ops, adapted) if adapted else self.ops
        logits = ops.linear_fp32(self.weights.head, hidden, self._head_norm, out)
        if self.config.logits_divisor != 1:
            logits.div_(self.config.logits_divisor)
        if cap := self.config.final_softcap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    @cached_property
    def _whole_step(self) -> HostLayers | None:
        if self.taps:
            return None  # it gives no hidden states between layers
        return whole_step(self.config, self.weights.decoder, self.comm, self.ops, self._specs.values(), self._like)

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
        """Run the encoder over whole inputs, and write the decoder's keys and values of its output to the cache.

        Args:
            rows: packed rows.
            cache: is written to.
            embeddings: see extend.
            attentions: an empty list, which takes the attention weights of each layer, fp32 [B, H, S, S], S being the
                longest row; None: they are not wanted.

        Returns:
            [T, hidden], normed.
        """
        stack, weights = self.config.encoder, self.weights.encoder
        assert stack and weights, "there is no encoder"
        attend = self.ops.encoder_attention(rows, self._encoder_spec, self._like, attentions)
        tasks = cache.sources[1, rows.slots][None] if self.config.ia3_num_tasks else None
        context = LayerContext(self.ops, self.comm, attend, tasks)
        x = self._embed(rows, cache, embeddings)
        for layer in weights.layers:
            x = run_layer(stack, layer, x, context, self._like)  # an encoder caches nothing
        x = self.comm.broadcast_output(self.comm.send_output(x))
        x = self.ops.norm(x, weights.final_norm) if weights.final_norm else x
        self._write_source(x, rows, cache, tasks)
        if attentions is not None:
            shape = len(rows.ends) - 1, stack.head_num, rows.longest
            attentions[:] = self.comm.gather_attentions(attentions, stack.num_layer, shape)
        return x[0]

    def _write_source(self, encoded: Tensor, rows: Rows, cache: KvCache, tasks: Tensor | None) -> None:
        """Write each decoder layer's keys and values of the encoder's output, [1, T, hidden], to the rows' slots."""
        if not self.weights.decoder:
            return
        pages, offsets = cache.source_page_tables[rows.slots, rows.positions // PAGE], rows.positions % PAGE
        for layer, kv in zip(self.weights.decoder.layers, cache.kv, strict=True):
            assert layer.cross
            k, v = split_heads(self.ops.linear(layer.cross.key_value, encoded), 2, self.config.size_per_head)
            k, v = scale_by_task(k, layer.cross.ia3, 0, tasks), scale_by_task(v, layer.cross.ia3, 1, tasks)
            self.ops.kv_write(kv, pages, offsets, k[0], v[0])

    def _decoder(
        self,
        x: Tensor,
        prepare: Callable[[AttentionSpec], PreparedAttention],
        slots: Tensor | slice,
        cache: KvCache,
        tapped: list[Tensor],
        rows: Rows | None = None,
        adapted: AdaptedRows | None = None,
        state_rows: StateRows | None = None,
    ) -> Tensor:
        """Run this process's layers of the decoder.

        Args:
            x: [1, T, hidden] or [B, 1, hidden].
            prepare: prepares self-attention for the layers that attend in one way.
            slots: of x.
            cache: keys and values, and states.
            tapped: takes the hidden states of the taps, in their order.
            rows: packed rows that x is of; None: each has one token, and goes on.
            adapted: see extend.
            state_rows: see extend.
        """
        config, weights, taps = self.config, self.weights.decoder, self.taps.layers if self.taps else ()
        assert weights, "there is no decoder"
        tasks_here, attend_source = None, None
        if cache.shape.has_cross:
            lengths, tasks = cache.sources[:, slots]
            attend_source = self.ops.cross_attention(cache.source_page_tables[slots], lengths, config.attention_scale)
            tasks_here = tasks.view(x.shape[:2]) if config.ia3_num_tasks else None
        states = self._no_states
        if cache.states:
            states = cache.states.layers
            own = cache.states.of_slots[rows.row_slots if rows else slots]
            state_rows = state_rows or self.ops.state_rows(own, rows)
        ops = AdaptedOps(self.ops, adapted) if adapted else self.ops
        contexts = {
            kind: LayerContext(ops, self.comm, prepare(spec), tasks_here, attend_source, state_rows)
            for kind, spec in self._specs.items()
        }
        layers = zip(weights.indices, weights.layers, self._kinds, cache.kv, states, strict=True)
        for index, layer, kind, kv, state in layers:
            if index in taps:
                tapped.append(x.clone())  # a layer overwrites it
            x = run_layer(config, layer, x, contexts[kind], kv, state)
        if config.num_layer in taps:
            tapped.append(x)
        return x

    def _attention_of(self, spec: AttentionSpec) -> Ops | LatentOps:
        return self.ops.latent if spec.is_latent else self.ops

    def _embed(self, rows: Rows, cache: KvCache, embeddings: Tensor | None) -> Tensor:
        """Return the first layer's input of packed rows, [1, T, hidden]."""
        return self.comm.recv_input(lambda: self._embed_rows(rows, cache, embeddings)[None], (1, len(rows.ids)))

    def _embed_rows(self, rows: Rows, cache: KvCache, embeddings: Tensor | None) -> Tensor:
        weights = self.weights
        x = F.embedding(rows.ids, weights.token_embedding).to(self._like.dtype)
        x = x if self._embedding_scale == 1 else x * self._embedding_scale
        if embeddings is not None:
            x = torch.where(embeddings[..., :1].isnan(), x, embeddings.to(x.dtype))
        if weights.position_embedding is not None:
            table = weights.position_embedding
            x = x + F.embedding(rows.positions.clamp(max=len(table) - 1), table)  # padding may be behind the last one
        return self.ops.norm(x, weights.embedding_norm) if weights.embedding_norm else x

    def _embed_next(self, ids: Tensor, positions: Tensor, slots: Tensor | slice, cache: KvCache) -> Tensor:
        """Return the first layer's input of one token of each row, [B, 1, hidden]."""
        weights = self.weights
        x = self.ops.embed(ids, positions, weights.token_embedding, weights.position_embedding, self._like.dtype)
        x = x if self._embedding_scale == 1 else x * self._embedding_scale
        return (self.ops.norm(x, weights.embedding_norm) if weights.embedding_norm else x)[:, None]
