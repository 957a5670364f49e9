"""The network: token ids in, hidden states and logits out, keys and values kept in a cache.

One class for every family: a stack of layers that config.ini's keys shape (config.Stack), of which an encoder-decoder
has two. B: rows of a call; T: tokens of this call; S: keys that a row looks at; H: heads (this process's, where several
share the layers); D: size of a head; V: vocabulary.

A row is one sequence, or one beam of one. Its keys and values live in one slot of the cache; see attention.py. Rows of
different length are padded on the right, and padding is never seen: a row computes the same numbers whatever else is in
the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..attention.attention import ContinuedRows, NewRows, Slots, Source
from ..attention.page_rows import PackedRows, PageTokens, WholeRows, kept_source, next_tokens, whole_input
from ..attention.pages import Cache, PagedCache, put
from ..checkpoint.config import ModelConfig, Stack
from ..checkpoint.layouts import ModelWeights, StackWeights
from ..kernels import can_run_on
from ..linear import Norming
from .layers import Call, Links, adapted, norming, run_layer, split
from .positions import Alibi, Bias, Relative, Rotary, Rotation


class Network:
    """A network, or one process's part of it.

    Args:
        config: of the whole.
        weights: tensors.
        links: to the other parts.

    Attributes:
        config, weights, links: those.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, links: Links | None = None) -> None:
        self.config = config
        self.weights = weights
        self.links = links or Links()
        self._bias = _position_bias(config, weights.decoder, is_both_ways=False)
        self._encoder_bias = _position_bias(config.encoder, weights.encoder, is_both_ways=True)

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
        x = self.links.enter(lambda: self._embed(ids, positions, embeddings), (batch, length))  # [B, T, hidden]
        rotate = self._rotation(positions)
        return self.links.leave(self._decoder(x, attend, rotate, slots, cache, source))

    def begin(self, tokens: Tensor, ends: Tensor, lengths: list[int] | None, cache: Cache) -> Tensor:
        """Run new rows, one behind the other: what an encoder is given, where there is one, else contexts.

        Args:
            tokens: [3, T]: id, position in its row, and slot of each.
            ends: int32 [B + 1]: 0, then where each row ends.
            lengths: of the rows; None: only the device knows them, see pages.PackedRows.
            cache: where keys and values go.

        Returns:
            [T, hidden], before the final norm; of an encoder behind it.
        """
        if cache.shape.has_cross:
            return self._take_in(tokens, ends, lengths, cache)
        kind = (self._bias, self.config.attention_scale, self._like)
        ids, positions, rows = tokens.unbind()
        tables = cache.tables if isinstance(cache, PagedCache) else None
        is_fused, where = tables is not None and tables.is_cuda, positions[None]
        attend = PackedRows(tables, rows, positions, ends, lengths, *kind, self._rotary if is_fused else None)
        x = self.links.enter(lambda: self._embed(ids[None], where, None), (1, len(ids)))  # [1, T, hidden]
        rotate = None if is_fused else self._rotation(where)
        return self.links.leave(self._decoder(x, attend, rotate, slice(0, 0), cache, None))[0]

    def _take_in(self, tokens: Tensor, ends: Tensor, lengths: list[int] | None, cache: Cache) -> Tensor:
        """Run the encoder over inputs, see begin, and keep what its decoder needs of them."""
        assert isinstance(cache, PagedCache) and self.config.encoder, "encode takes what is padded"
        ids, positions, rows = tokens.unbind()
        longest, scale = max(lengths) if lengths else len(ids), self.config.encoder.attention_scale
        attend = WholeRows(ends[:-1], ends.diff(), longest, self._encoder_bias, scale)
        x = self._encode(lambda: self._embed(ids[None], positions[None], None), (1, len(ids)), Call(attend))
        places = cache.source_places(rows, positions)
        for part, (k, v) in zip(cache.cross_memory, self._source_parts(x, None), strict=True):
            put(part, *places, k, v)
        return x[0]

    def can_begin(self) -> bool:
        """Say whether begin can do without lengths, and an encoder's input without padding."""
        return can_run_on(self._like.device) and not self.config.ia3_num_tasks

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
        x = self.links.enter(lambda: self._embed_next(ids, positions), (len(ids), 1))  # [B, 1, hidden]
        return self.links.leave(self._decoder(x, attend, rotate, slots, cache, source))[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., hidden] -> fp32 [..., V], or this process's part of the vocabulary."""
        assert self.weights.head, "this process does not predict"
        return self.weights.head.in_fp32(hidden, self._head_norm)

    @cached_property
    def _head_norm(self) -> Norming | None:
        """The norm before the head, with the factor that a tied T5 has there in its weight."""
        assert self.weights.decoder, "there is no decoder"
        norm = norming(self.config, self.weights.decoder.final_norm)
        if norm and self.config.scales_head:
            norm = replace(norm, weight=norm.weight * self.config.hidden_units**-0.5)
        return norm

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
        stack = self.config.encoder
        assert stack, "there is no encoder"
        batch, length = ids.shape
        positions = torch.arange(length, device=ids.device)[None]
        kept: list[Tensor] | None = None if attentions is None else []
        attend = whole_input(lengths, length, self._encoder_bias, stack.attention_scale, self._like, kept)
        embed = partial(self._embed, ids, positions, embeddings)
        encoded = self._encode(embed, (batch, length), Call(attend, tasks=tasks))
        if attentions is not None and kept is not None:
            attentions += self.links.gather(kept, (batch, length))
        return encoded

    def _encode(self, embed: Callable[[], Tensor], shape: tuple[int, int], call: Call) -> Tensor:
        """Run the encoder on what embed gives, [*shape, hidden]."""
        stack, weights = self.config.encoder, self.weights.encoder
        assert stack and weights, "there is no encoder"
        x = self.links.enter(embed, shape)
        for layer in weights.layers:
            x = run_layer(stack, layer, x, call, self.links)
        x = self.links.spread(self.links.leave(x))
        norm = norming(stack, weights.final_norm)
        return norm(x) if norm else x

    def remember(
        self, encoded: Tensor, lengths: Tensor, slots: Slots, cache: Cache, tasks: Tensor | None = None
    ) -> None:
        """Put the keys and values of what the encoder has made, [B, S, hidden], into the rows' slots."""
        cells = cache.source_cells(slots)
        for memory, (k, v) in zip(cache.cross_memory, self._source_parts(encoded, tasks), strict=True):
            cells.begin(memory, k, v, lengths)

    def _source_parts(self, encoded: Tensor, tasks: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Give each layer's keys and values of what the encoder has made: [B, S, hidden] -> [B, H, S, D] each."""
        assert self.weights.decoder, "there is no decoder"
        for layer in self.weights.decoder.layers:
            assert layer.cross
            k, v = split(self.config, layer.cross.key_value(encoded), 2)
            yield adapted(k, layer.cross.ia3, 0, tasks), adapted(v, layer.cross.ia3, 1, tasks)

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
        call = Call(attend, rotate)
        if source:
            where = cache.source_cells(slots), source.lengths, source.longest
            call = Call(attend, rotate, source.tasks, kept_source(x.shape[1], *where, config.attention_scale, x))
        memories = zip(cache.memory, cache.cross_memory, strict=True) if source else zip(cache.memory, strict=True)
        for layer, memory in zip(weights.layers, memories, strict=True):
            x = run_layer(config, layer, x, call, self.links, memory)
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
            from ..kernels.embedding import embed

            return embed(ids, positions, weights.token_embedding, weights.position_embedding)[:, None]
        return self._embed(ids[:, None], positions[:, None], None)

    def _embed(self, ids: Tensor, positions: Tensor, embeddings: Tensor | None) -> Tensor:
        x = F.embedding(ids, self.weights.token_embedding).to(self._like.dtype)
        if embeddings is not None:
            x = torch.where(embeddings[..., :1].isnan(), x, embeddings.to(x.dtype))
        if self.weights.position_embedding is not None:
            table = self.weights.position_embedding
            x = x + F.embedding(positions.clamp(max=len(table) - 1), table)  # padding may stand behind the last one
        norm = norming(self.config, self.weights.embedding_norm)
        return norm(x) if norm else x


def _position_bias(stack: Stack | None, weights: StackWeights | None, is_both_ways: bool) -> Bias | None:
    if stack is None or weights is None or weights.position_bias is None:
        return None
    if stack.positions == "alibi":
        return Alibi(weights.position_bias)
    return Relative(weights.position_bias, is_both_ways)
