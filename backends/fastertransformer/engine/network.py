"""The network: token ids in, hidden states and logits out, keys and values kept in a cache.

One class for every family: a stack of layers that config.ini's keys shape (config.Stack), of which an encoder-decoder
has two. B: rows of a call; T: tokens of this call; S: keys that a row looks at; H: heads (this process's, where several
share the layers); D: size of a head; V: vocabulary.

A row is one sequence, or one beam of one. Its keys and values live in one slot of the cache; see attention.py. Rows of
different length are padded on the right, and padding is never seen: a row computes the same numbers whatever else is in
the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from .attention import Alibi, Bias, ContinuedRows, NewRows, Relative, Rotary, Rotation, Slots, WholeInput
from .config import ModelConfig, Stack
from .kernels import can_run_on
from .layouts import CrossWeights, LayerWeights, ModelWeights, Norm, StackWeights
from .linear import Linear, Norming
from .pages import Cache, PackedRows, PagedCache, PageTokens, can_pack, next_tokens


class Links:
    """Where the network goes on in other processes; this is the case that it does not. See parallel.ProcessLinks.

    Attributes:
        is_alone: whether every sum is whole in this process.
    """

    is_alone = True

    def share(self, ids: Tensor) -> Tensor:
        """Give every process rank 0's numbers."""
        return ids

    def enter(self, embed: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Give what the first layer here works on, [*shape, hidden]: the embedding, or an earlier process's result."""
        return embed()

    def reduce(self, part: Tensor) -> Tensor:
        """Sum the parts of a matrix product, each of which a process has computed with its rows of the matrix."""
        return part

    def leave(self, x: Tensor) -> Tensor:
        """Pass on what the last layer here has made; gives the last layer of all's where this process predicts."""
        return x

    def spread(self, x: Tensor) -> Tensor:
        """Give every process what the last layer of all has made."""
        return x

    def gather(self, parts: list[Tensor], shape: tuple[int, int]) -> list[Tensor]:
        """Give what every layer of the encoder attends to, [B, H, S, S] each, of [B, S] and what the layers here do."""
        return parts


@dataclass(frozen=True)
class Source:
    """What the rows of an encoder-decoder answer to; see Network.remember.

    Attributes:
        lengths: [B] of their inputs.
        longest: the largest of them, known on the host.
        tasks: [B], each row's IA3 task; None: no row has one.
    """

    lengths: Tensor
    longest: int
    tasks: Tensor | None = None


@dataclass(frozen=True)
class _Call:
    """What all layers of a stack share in one call.

    Attributes:
        attend: q, k, v (and the layer's part of the cache) -> attended, [B, H, T, D] each.
        rotate: turns queries and keys; None: not.
        tasks: [B], see Source.
        attend_source: to the keys and values of the encoder's output.
        source: where those are in a layer's cross memory: slots, and how many entries.
    """

    attend: Callable[..., Tensor]
    rotate: Rotation | None = None
    tasks: Tensor | None = None
    attend_source: WholeInput | None = None
    source: tuple[Slots, int] = (slice(0, 0), 0)


class Network:
    """A network, or one process's part of it.

    Args:
        config: of the whole.
        weights: tensors.
        links: to the other parts.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, links: Links | None = None) -> None:
        self.config = config
        self.weights = weights
        self._links = links or Links()
        self._bias = _position_bias(config, weights.decoder, is_both_ways=False)
        self._encoder_bias = _position_bias(config.encoder, weights.encoder, is_both_ways=True)

    def share(self, ids: Tensor) -> Tensor:
        """Give what rank 0 has chosen, int64 [B], in every process."""
        return self._links.share(ids)

    def extend(
        self,
        ids: Tensor,
        starts: Tensor | None,
        lengths: Tensor,
        slots: Slots,
        cache: Cache,
        longest: int,
        embeddings: Tensor | None = None,
        source: Source | None = None,
    ) -> Tensor:
        """Run several tokens of every row.

        Args:
            ids: [B, T] token ids, padded on the right with any legal id.
            starts: [B] position of each row's first token, which attends to everything cached before it; None where
                all are new rows: that is faster.
            lengths: [B] how many of a row's T tokens are real; at least 1.
            slots: of each row; a slice is faster than indices.
            cache: where keys and values go; T is at most the window of a row that has one.
            longest: the most cells that a row has in use afterwards, min(starts + lengths, window), known on the host
                so that the device need not be asked.
            embeddings: [B, T, hidden] in place of the token embeddings; a token whose first number is NaN keeps its
                own.
            source: of an encoder-decoder.

        Returns:
            [B, T, hidden], before the final norm; what stands behind a row's length means nothing.
        """
        batch, length = ids.shape
        steps = torch.arange(length, device=ids.device)
        positions = steps[None] if starts is None else starts[:, None] + steps  # [1 or B, T]
        kind = (self._bias, self.config.attention_scale, self._like)
        attend: NewRows | ContinuedRows
        if starts is None:
            attend = NewRows(lengths, length, cache.cells(slots), *kind)
        else:
            attend = ContinuedRows(starts, lengths, length, cache.cells(slots), cache.windows[slots], longest, *kind)
        x = self._links.enter(lambda: self._embed(ids, positions, embeddings), (batch, length))  # [B, T, hidden]
        rotate = self._rotation(positions)
        return self._links.leave(self._decoder(x, attend, rotate, slots, cache, source))

    def begin(self, tokens: Tensor, ends: Tensor, lengths: list[int] | None, cache: PagedCache) -> Tensor:
        """Run new rows, one behind the other.

        Args:
            tokens: [3, T]: id, position in its row, and slot of each.
            ends: int32 [B + 1]: 0, then where each row ends.
            lengths: of the rows; None: only the device knows them, see pages.PackedRows.
            cache: where keys and values go.

        Returns:
            [T, hidden], before the final norm.
        """
        kind = (self._bias, self.config.attention_scale, self._like)
        ids, positions, rows = tokens.unbind()
        attend = PackedRows(cache.tables, rows, positions, ends, lengths, *kind)
        where = positions[None]
        x = self._links.enter(lambda: self._embed(ids[None], where, None), (1, len(ids)))  # [1, T, hidden]
        return self._links.leave(self._decoder(x, attend, self._rotation(where), slice(0, 0), cache, None))[0]

    def can_begin(self) -> bool:
        """Say whether begin can do without lengths."""
        heads = self._like.new_empty(0, self.config.size_per_head)
        return self._bias is None and can_pack(heads)

    def decode(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Slots,
        cache: Cache,
        longest: int,
        source: Source | None = None,
    ) -> Tensor:
        """Run one token of every row.

        Args:
            ids: [B] token ids.
            positions: [B], each token's position in its row.
            slots: of each row; a slice is faster than indices.
            cache: holds the keys and values of the tokens before.
            longest: the most cells that a row has in use afterwards, min(position + 1, window), known on the host.
            source: of an encoder-decoder.

        Returns:
            [B, hidden], before the final norm.
        """
        kind = (self._bias, self.config.attention_scale, self._like)
        attend = next_tokens(positions, cache.cells(slots), cache.windows[slots], longest, *kind)
        rotate = None
        if isinstance(attend, PageTokens):
            attend.rotary = self._rotary
        else:
            rotate = self._rotation(positions[:, None])
        x = self._links.enter(lambda: self._embed_next(ids, positions), (len(ids), 1))  # [B, 1, hidden]
        return self._links.leave(self._decoder(x, attend, rotate, slots, cache, source))[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., hidden] -> fp32 [..., V]."""
        assert self.weights.head and self.weights.decoder, "this process does not predict"
        norm = _norming(self.config, self.weights.decoder.final_norm)
        if self.config.scales_head:
            hidden, norm = (norm(hidden) if norm else hidden) * self.config.hidden_units**-0.5, None
        return self.weights.head.in_fp32(hidden, norm)

    def encode(
        self,
        ids: Tensor,
        lengths: Tensor,
        tasks: Tensor | None = None,
        embeddings: Tensor | None = None,
        attentions: list[Tensor] | None = None,
    ) -> Tensor:
        """Run the encoder over whole inputs.

        Args:
            ids: [B, S] token ids, padded on the right with any legal id.
            lengths: [B], real tokens of each.
            tasks: [B], see Source.
            embeddings: see extend.
            attentions: takes what each layer attends to, fp32 [B, H, S, S]; None: nobody asks.

        Returns:
            [B, S, hidden], normed; what stands behind a row's length means nothing.
        """
        stack, weights = self.config.encoder, self.weights.encoder
        assert stack and weights, "there is no encoder"
        batch, length = ids.shape
        positions = torch.arange(length, device=ids.device)[None]
        kept: list[Tensor] | None = None if attentions is None else []
        attend = WholeInput(lengths, length, self._encoder_bias, stack.attention_scale, self._like, kept)
        call = _Call(attend, tasks=tasks)
        x = self._links.enter(lambda: self._embed(ids, positions, embeddings), (batch, length))
        for layer in weights.layers:
            x = self._layer(stack, layer, x, call)
        x = self._links.spread(self._links.leave(x))
        if attentions is not None and kept is not None:
            attentions += self._links.gather(kept, (batch, length))
        norm = _norming(stack, weights.final_norm)
        return norm(x) if norm else x

    def remember(self, encoded: Tensor, slots: Slots, cache: Cache, tasks: Tensor | None = None) -> None:
        """Put the keys and values of what the encoder has made, [B, S, hidden], into the rows' slots."""
        assert self.weights.decoder, "there is no decoder"
        for layer, memory in zip(self.weights.decoder.layers, cache.cross_memory, strict=True):
            assert layer.cross
            k, v = self._split(self.config, layer.cross.key_value(encoded), 2)  # [B, H, S, D]
            k, v = _adapted(k, layer.cross.ia3, 0, tasks), _adapted(v, layer.cross.ia3, 1, tasks)
            memory[0, slots, :, : k.shape[2]], memory[1, slots, :, : k.shape[2]] = k, v

    @property
    def _like(self) -> Tensor:
        """A tensor on this process's device, in the format of keys and values."""
        return self.weights.like

    def _decoder(
        self,
        x: Tensor,
        attend: Callable[..., Tensor],
        rotate: Rotation | None,
        slots: Slots,
        cache: Cache,
        source: Source | None,
    ) -> Tensor:
        """Run this process's layers of the decoder on x [B, T, hidden]."""
        config, weights = self.config, self.weights.decoder
        assert weights, "there is no decoder"
        call = _Call(attend, rotate)
        if source:
            attend_source = WholeInput(source.lengths, source.longest, None, config.attention_scale, x)
            call = _Call(attend, rotate, source.tasks, attend_source, (slots, source.longest))
        memories = zip(cache.memory, cache.cross_memory, strict=True) if source else zip(cache.memory, strict=True)
        for layer, memory in zip(weights.layers, memories, strict=True):
            x = self._layer(config, layer, x, call, memory)
        return x

    @property
    def _rotary(self) -> Rotary | None:
        config = self.config
        return Rotary(config.rotary_dim, config.rotates_pairs) if config.rotary_dim else None

    def _rotation(self, positions: Tensor) -> Rotation | None:
        """Say how queries and keys at positions, [1 or B, T], are turned."""
        return Rotation(positions, self._rotary, self._like.dtype) if self._rotary else None

    def _embed_next(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[B] each -> [B, 1, hidden]; see _embed."""
        weights = self.weights
        if can_run_on(ids.device) and weights.token_embedding.dtype == self._like.dtype and not weights.embedding_norm:
            from .kernels.embedding import embed

            return embed(ids, positions, weights.token_embedding, weights.position_embedding)[:, None]
        return self._embed(ids[:, None], positions[:, None], None)

    def _embed(self, ids: Tensor, positions: Tensor, embeddings: Tensor | None) -> Tensor:
        x = F.embedding(ids, self.weights.token_embedding).to(self._like.dtype)
        if embeddings is not None:
            x = torch.where(embeddings[..., :1].isnan(), x, embeddings.to(x.dtype))
        if self.weights.position_embedding is not None:
            table = self.weights.position_embedding
            x = x + F.embedding(positions.clamp(max=len(table) - 1), table)  # padding may stand behind the last one
        norm = _norming(self.config, self.weights.embedding_norm)
        return norm(x) if norm else x

    def _layer(
        self, stack: Stack, layer: LayerWeights, x: Tensor, call: _Call, memory: Sequence[Tensor] = ()
    ) -> Tensor:
        """Run a layer on x [B, T, hidden], which is overwritten; memory: its own and its cross part of the cache."""
        first, second = _norming(stack, layer.input_norm), _norming(stack, layer.post_norm)
        if stack.is_parallel:
            if not second:  # both work on the same numbers
                assert first
                normed, first = first(x), None
            else:
                normed = x
            attended = self._attend(stack, layer, normed, first, call, memory[:1])
            inner = _mlp(stack, layer, normed, second, call.tasks)
            return self._add(self._add(x, layer.attention_out, attended), layer.mlp_out, inner)
        before, behind = ((first, second), (None, None)) if stack.is_pre_norm else ((None, None), (first, second))
        x = self._add(x, layer.attention_out, self._attend(stack, layer, x, before[0], call, memory[:1]))
        x = behind[0](x) if behind[0] else x
        if layer.cross:
            x = self._add(x, layer.cross.out, self._attend_source(stack, layer.cross, x, call, memory[1]))
        x = self._add(x, layer.mlp_out, _mlp(stack, layer, x, before[1], call.tasks))
        return behind[1](x) if behind[1] else x

    def _add(self, x: Tensor, linear: Linear, inner: Tensor) -> Tensor:
        """Add a product to x in place: this process's alone, or the sum of all processes' parts."""
        if self._links.is_alone:
            return linear.fused(inner, residual=x)
        x += self._links.reduce(linear(inner))
        return x

    def _attend(
        self,
        stack: Stack,
        layer: LayerWeights,
        x: Tensor,
        norm: Norming | None,
        call: _Call,
        memory: Sequence[Tensor],
    ) -> Tensor:
        """Give what the heads of this process attend to, [B, T, H * D]."""
        q, k, v = self._split(stack, layer.qkv.fused(x, norm), 3)  # [B, H, T, D] each
        k, v = _adapted(k, layer.ia3, 0, call.tasks), _adapted(v, layer.ia3, 1, call.tasks)
        if call.rotate:
            q, k = call.rotate(q), call.rotate(k)
        return _joined(call.attend(q, k, v, *memory))

    def _attend_source(self, stack: Stack, cross: CrossWeights, x: Tensor, call: _Call, memory: Tensor) -> Tensor:
        assert call.attend_source
        slots, longest = call.source
        (q,) = self._split(stack, cross.query.fused(x, _norming(stack, cross.norm)), 1)
        keys, values = memory[0, slots, :, :longest], memory[1, slots, :, :longest]  # [B, H, S, D]
        return _joined(call.attend_source(q, keys, values))

    def _split(self, stack: Stack, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[B, T, parts * H * D] -> [B, H, T, D] each."""
        return x.view(*x.shape[:2], parts, -1, stack.size_per_head).permute(2, 0, 3, 1, 4).unbind()


def _position_bias(stack: Stack | None, weights: StackWeights | None, is_both_ways: bool) -> Bias | None:
    if stack is None or weights is None or weights.position_bias is None:
        return None
    if stack.positions == "alibi":
        return Alibi(weights.position_bias)
    return Relative(weights.position_bias, is_both_ways)


def _norming(stack: Stack, norm: Norm | None) -> Norming | None:
    return Norming(norm.weight, norm.bias, stack.layernorm_eps, stack.is_rms) if norm else None


def _mlp(stack: Stack, layer: LayerWeights, x: Tensor, norm: Norming | None, tasks: Tensor | None) -> Tensor:
    """Give the inner layer of norm(x): [B, T, hidden] -> this process's part of [B, T, inter]."""
    if layer.mlp_gate and norm:
        x, norm = norm(x), None
    inner = layer.mlp_in.fused(x, norm, stack.activation)
    if layer.mlp_gate:
        inner *= layer.mlp_gate(x)
    if layer.ia3 and tasks is not None:
        inner *= layer.ia3[2][tasks][:, None]
    return inner


def _adapted(x: Tensor, ia3: tuple[Tensor, ...] | None, index: int, tasks: Tensor | None) -> Tensor:
    """Scale keys or values, [B, H, T, D], by their rows' tasks."""
    if ia3 is None or tasks is None:
        return x
    return x * ia3[index][tasks].view(len(tasks), -1, 1, x.shape[-1])


def _joined(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H * D]."""
    return x.transpose(1, 2).flatten(2)
