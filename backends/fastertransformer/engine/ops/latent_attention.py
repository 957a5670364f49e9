"""Latent attention in torch: the cache holds one narrow vector for each token, which all heads share.

B: rows; T: tokens of the call; H: heads in this process; P, R: numbers of a head's query and key that are not rotated,
and that are; V: of its values; N: width of the latent vector, which the keys' P and the values are made from.

An entry of the cache is the rotated part of the key, one for all heads, and behind it the latent vector after its norm,
R + N numbers. Tokens that see the cache attend in the absorbed form: what makes keys of latent vectors is multiplied to
the queries, and what makes values of them to what comes out, so that it is attention of all heads to one head of R + N
numbers, and no key or value of an earlier token is made again. New rows see themselves alone and attend in the plain
form, which takes a third of the operations: keys of P + R numbers and values of V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..arrays import Array
from ..cache.kv_cache import PAGE, KvCache
from .adapted_rows import AdaptedRows
from .linear import Norm
from .low_rank import Adaptable
from .packed_rows import Rows
from .positions import Attend, AttentionSpec
from .torch_attention import KvWrite, within_rows


class LatentUp(Adaptable):
    """What makes keys and values of a latent vector.

    Args:
        norm: of the latent vector, before the cache.
        matrix: [H, P + V, N].
        plain_size: P.
    """

    def __init__(self, norm: Norm, matrix: Tensor, plain_size: int) -> None:
        self.norm, self.matrix, self.plain_size = norm, matrix, plain_size

    def made(self, latent: Tensor) -> Tensor:
        """Make keys and values of all heads, [T, N] -> [T, H, P + V]."""
        return F.linear(latent, self.matrix.flatten(0, 1)).view(len(latent), *self.matrix.shape[:2])

    def absorbed(self, q: Tensor) -> Tensor:
        """Multiply what makes keys to queries, [H, T, P] -> [H, T, N]."""
        return torch.bmm(q, self.matrix[:, : self.plain_size])

    def released(self, attended: Tensor) -> Tensor:
        """Make values of attended latent vectors, [H, T, N] -> [H, T, V]."""
        return torch.bmm(attended, self.matrix[:, self.plain_size :].mT)


class AdaptedUp(LatentUp):
    """The same for tokens some of which have adapters; all that a token sees has its own one.

    Args:
        up: what they change.
        rows: the tokens.
    """

    def __init__(self, up: LatentUp, rows: AdaptedRows) -> None:
        super().__init__(up.norm, up.matrix, up.plain_size)
        assert up.low_rank, "adapters change it"
        self._low_rank, self._rows = up.low_rank, rows
        self._down = up.low_rank.down[:, None]  # [places, 1, rank, N]
        self._up = up.low_rank.up.view(-1, *up.matrix.shape[:2], up.low_rank.rank)  # [places, H, P + V, rank]

    def made(self, latent: Tensor) -> Tensor:
        """See LatentUp."""
        y = super().made(latent)
        self._rows.add(y.flatten(1), latent, self._low_rank)
        return y

    def absorbed(self, q: Tensor) -> Tensor:
        """See LatentUp."""
        y = super().absorbed(q)
        self._rows.add_by_head(y, q, self._up[:, :, : self.plain_size].mT, self._down.mT, self._low_rank)
        return y

    def released(self, attended: Tensor) -> Tensor:
        """See LatentUp."""
        y = super().released(attended)
        self._rows.add_by_head(y, attended, self._down, self._up[:, :, self.plain_size :], self._low_rank)
        return y


class LatentAttend(Protocol):
    """Latent attention of one call's rows, prepared for all layers that attend in one way."""

    def __call__(self, q: Tensor, narrow: Tensor, up: LatentUp, kv: Tensor) -> Tensor:
        """Attend -> [B, H, 1, V] or [1, H, T, V].

        Args:
            q: [B, H, 1, P + R] or [1, H, T, P + R], not rotated.
            narrow: [B, 1, N + R] or [1, T, N + R]: of each token its latent vector, before its norm, and the part of
                its key that is to be rotated.
            up: of this layer.
            kv: the layer's cache, [1, pages, 1, PAGE, R + N].
        """


class LatentOps:
    """Latent attention on one device, by attention to one head; see Ops for what prepares what.

    Args:
        norm: norms as Ops.norm does.
        extend: as Ops.extend_attention does.
        decode: as Ops.decode_attention does.

    Attributes:
        can_capture: see Ops.
    """

    can_capture = False

    def __init__(
        self,
        norm: Callable[[Tensor, Norm], Tensor],
        kv_write: KvWrite,
        extend: Callable[..., Attend],
        decode: Callable[..., Attend],
    ) -> None:
        self._norm, self._kv_write, self._extend, self._decode = norm, kv_write, extend, decode

    def prefill_attention(self, cache: KvCache, rows: Rows, spec: AttentionSpec, like: Tensor) -> LatentAttend:
        """Prepare attention of new rows to themselves."""
        within = self._within(rows, spec, like)
        pages, offsets = cache.page_tables[rows.slots, rows.positions // PAGE], rows.positions % PAGE
        rotate = spec.rotation(rows.positions[None], like)
        assert rotate, "latent attention rotates"

        def attend(q: Tensor, narrow: Tensor, up: LatentUp, kv: Tensor) -> Tensor:
            entries = rotate(self._entries(narrow, up))
            self._kv_write(kv, pages, offsets, entries[0], entries[0])
            heads, _, width = up.matrix.shape
            made = up.made(entries[0, 0, :, -width:])[None].transpose(1, 2)
            keys, values = made[..., : up.plain_size], made[..., up.plain_size :]  # [1, H, T, P], [1, H, T, V]
            keys = torch.cat((entries[..., :-width].expand(-1, heads, -1, -1), keys), -1)
            return _of_one_width(within, rotate(_rotated_first(q, up)), keys, values)

        return attend

    def extend_attention(
        self, cache: KvCache, rows: Rows, longest: int, spec: AttentionSpec, like: Tensor
    ) -> LatentAttend:
        """Prepare attention of rows that continue what their slots hold."""
        return self._absorbed(self._extend(cache, rows, longest, spec, like))

    def decode_attention(
        self, positions: Tensor, tables: Tensor, windows: Tensor, spec: AttentionSpec, like: Tensor
    ) -> LatentAttend:
        """Prepare attention of one token of each row."""
        return self._absorbed(self._decode(positions, tables, windows, spec, like))

    def continues_plainly(self, starts: Array, lengths: Array) -> bool:
        """Return whether rows that continue what is cached are best run without a CUDA graph; see latent_continued.

        Args:
            starts: int64 [B], position of each row's first token.
            lengths: int64 [B], of the rows.
        """
        return False

    def _within(self, rows: Rows, spec: AttentionSpec, like: Tensor) -> Callable[..., Tensor]:
        """Prepare causal attention of packed rows to themselves, with keys and values of one width."""
        return within_rows(rows, spec, like, is_causal=True)

    def _absorbed(self, attend_one: Attend) -> LatentAttend:
        def attend(q: Tensor, narrow: Tensor, up: LatentUp, kv: Tensor) -> Tensor:
            entries = self._entries(narrow, up)
            absorbed = _by_head(q[..., : up.plain_size], up.absorbed)
            query = torch.cat((q[..., up.plain_size :], absorbed), -1)  # [B, H, T, R + N]
            attended = attend_one(query, entries, entries, kv)
            return _by_head(attended[..., -up.matrix.shape[2] :], up.released)

        return attend

    def _entries(self, narrow: Tensor, up: LatentUp) -> Tensor:
        """Make entries of the cache, not yet rotated: [B, T, N + R] -> [B, 1, T, R + N]."""
        width = up.matrix.shape[2]
        return torch.cat((narrow[..., width:], self._norm(narrow[..., :width], up.norm)), -1)[:, None]


def _by_head(x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Multiply what each head has, [B, H, T, n], at once for all rows; torch's own way copies matrices for each."""
    heads = x.transpose(0, 1)
    return multiply(heads.flatten(1, 2)).view(*heads.shape[:3], -1).transpose(0, 1)


def _rotated_first(q: Tensor, up: LatentUp) -> Tensor:
    """Move what is rotated of each head to its front, where a Rotation expects it."""
    return torch.cat((q[..., up.plain_size :], q[..., : up.plain_size]), -1)


def _of_one_width(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with keys and values of different width: torch's fast kernels want one, so the narrower has zeros."""
    size, value_size = q.shape[-1], v.shape[-1]
    wide = max(size, value_size)
    q, k, v = (F.pad(each, (0, wide - each.shape[-1])) if each.shape[-1] < wide else each for each in (q, k, v))
    return attend(q, k, v)[..., :value_size]
