"""How a layer attends: scale, cap and window of its scores, a bias by position (ALiBi, T5), and rotary positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .linear import HeadNorms


class Attend(Protocol):
    """Self-attention of one call's rows, prepared for all layers that attend in one way."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        norms: HeadNorms | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend; the result has q's shape.

        Args:
            q: [B, H, 1, D] or [1, H, T, D].
            k: Hkv heads, of which the query's head h uses h // (H / Hkv).
            v: likewise.
            kv: the layer's cache, [2, pages, Hkv, PAGE, D].
            norms: RMS norms of queries and keys, before they are rotated; None: there is none.
            sinks: fp32 [H], a score more of each head, which takes its share and adds nothing; None: there is none.
        """


CrossAttend = Callable[[Tensor, Tensor], Tensor]
"""q, [B, H, 1, D] or [1, H, T, D], and a layer's cache -> attended, of q's shape."""

_MAX_DISTANCE = 128  # of T5's buckets; FasterTransformer and Hugging Face agree on it


class Alibi:
    """A bias that penalizes distance by each head's slope.

    Attributes:
        by_distance, by_offset: the slopes, fp32 [H], for decoders and for encoders.
    """

    def __init__(self, slopes: Tensor) -> None:
        self.by_distance = self.by_offset = slopes

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the bias of attention scores: positions [B, T] and [B, S] -> [B, H, T, S]."""
        return self.by_distance[:, None, None] * (keys[:, None] - queries[:, :, None])[:, None]


def alibi_slopes(head_num: int) -> Tensor:
    """Return the slope of each head's penalty on distance, fp32 [head_num].

    A geometric sequence for the largest power of two, then every other term of the next one's ("Train Short, Test
    Long", and FasterTransformer's ``invokeBuildAlibiSlopes``).
    """
    whole = 1 << (head_num.bit_length() - 1)
    first = [2.0 ** (-8.0 * (index + 1) / whole) for index in range(whole)]
    more = [2.0 ** (-4.0 * (2 * index + 1) / whole) for index in range(head_num - whole)]
    return torch.tensor(first + more)


class Relative:
    """A bias that is looked up by bucketed distance, as T5 does.

    Args:
        table: [H, buckets].
        is_both_ways: whether keys may follow queries; half of the buckets are for such keys.

    Attributes:
        by_distance: fp32 [H, n], the bias of a key by its distance before the query; the last applies to all beyond.
        by_offset: fp32 [H, 2 n + 1], the bias of a key by its offset, from n tokens before the query to n after it.
    """

    def __init__(self, table: Tensor, is_both_ways: bool) -> None:
        self._table, self._is_both_ways = table, is_both_ways
        offsets = torch.arange(-_MAX_DISTANCE, _MAX_DISTANCE + 1, device=table.device)
        self.by_offset = table[:, bucket(offsets, table.shape[1], is_both_ways)].float().contiguous()
        self.by_distance = self.by_offset[:, : _MAX_DISTANCE + 1].flip(1)

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the bias of attention scores: positions [B, T] and [B, S] -> [B, H, T, S]."""
        distance = keys[:, None] - queries[:, :, None]  # [B, T, S]
        return self._table[:, bucket(distance, self._table.shape[1], self._is_both_ways)].movedim(0, 1)


def bucket(distance: Tensor, buckets: int, is_both_ways: bool) -> Tensor:
    """Number distances: one bucket each for small ones, then by their logarithm up to 128 (T5, appendix; any shape)."""
    offset = torch.zeros_like(distance)
    if is_both_ways:
        buckets //= 2
        offset = (distance > 0) * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    far = exact + ((distance.clamp(min=1) / exact).log() / math.log(_MAX_DISTANCE / exact) * (buckets - exact)).long()
    return offset + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class Rotary(NamedTuple):
    """Rotary positions.

    Attributes:
        width: how many numbers of each head are rotated.
        is_by_pairs: whether neighbours are rotated with each other (GPT-J), else the two halves (GPT-NeoX).
        inverse_frequencies: fp32 [width / 2], the angle of each rotation from one position to the next; computed once,
            when the model is loaded.
        factor: what the rotated numbers are multiplied by.
    """

    width: int
    is_by_pairs: bool
    inverse_frequencies: Tensor
    factor: float = 1.0


def plain_frequencies(width: int, base: float = 10000.0, device: torch.device | None = None) -> Tensor:
    """Return the angles from one position to the next that no scaling has changed, fp32 [width / 2]."""
    powers = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    return base**-powers


class Rotation:
    """Rotates the first numbers of each head's query and key by angles that grow with the position.

    Args:
        positions: [B or 1, T].
        rotary: how.
        dtype: of queries and keys.

    Attributes:
        width, is_by_pairs: see Rotary.
        sin: of each pair's angle, [B or 1, 1, T, width / 2].
        cos: of each number's, [B or 1, 1, T, width].
    """

    def __init__(self, positions: Tensor, rotary: Rotary, dtype: torch.dtype) -> None:
        self.width, self.is_by_pairs = rotary.width, rotary.is_by_pairs
        angles = positions[..., None].float() * rotary.inverse_frequencies  # [B or 1, T, width / 2]
        self.sin = (angles.sin() * rotary.factor).to(dtype)[:, None]  # [B or 1, 1, T, width / 2]
        angles = angles.repeat_interleave(2, -1) if self.is_by_pairs else torch.cat((angles, angles), -1)
        self.cos = (angles.cos() * rotary.factor).to(dtype)[:, None]  # [B or 1, 1, T, width]

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x, [B, H, T, D]."""
        width, half = self.width, self.width // 2
        pairs, halves = (slice(0, width, 2), slice(1, width, 2)), (slice(half), slice(half, width))
        first, second = pairs if self.is_by_pairs else halves
        rotated = x[..., :width] * self.cos
        rotated[..., first].addcmul_(x[..., second], self.sin, value=-1)
        rotated[..., second].addcmul_(x[..., first], self.sin)
        return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), -1)


class AttentionSpec(NamedTuple):
    """How a layer attends.

    Attributes:
        scale: of q k.
        bias: of attention scores, by positions; None: none.
        rotary: rotary positions of queries and keys; None: none.
        softcap: c of c * tanh(score / c), which a score is replaced by before it is masked; 0: scores are as they are.
        window: a token sees itself and the window - 1 tokens before it; 0: all before it.
        chunk: the text is cut at multiples of it, and a token sees none of another part; 0: it is whole.
        is_latent: whether the cache holds vectors from which keys and values are made; see latent_attention.py.
    """

    scale: float
    bias: Alibi | Relative | None = None
    rotary: Rotary | None = None
    softcap: float = 0.0
    window: int = 0
    chunk: int = 0
    is_latent: bool = False

    @property
    def reach(self) -> int:
        """Tokens that a token sees at most, itself among them; 0: all before it."""
        return self.chunk or self.window

    def first_seen(self, positions: Tensor) -> Tensor:
        """Return the first position that tokens at positions, of any shape, see."""
        if self.chunk:
            return positions // self.chunk * self.chunk
        return (positions + 1 - self.window).clamp(min=0) if self.window else torch.zeros_like(positions)

    def rotation(self, positions: Tensor, like: Tensor) -> Rotation | None:
        """Make the rotation, in torch, of queries and keys at positions, [B or 1, T]; None without rotary positions."""
        return Rotation(positions, self.rotary, like.dtype) if self.rotary else None
