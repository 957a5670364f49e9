"""Attention in torch, and of packed rows to themselves; cached_attention.py has attention to what the cache holds.

B: rows; T: tokens of the call; S: keys; H: heads of queries, Hkv of keys and values; D: size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from .packed_rows import Rows
from .positions import AttentionSpec

_WINDOW_BLOCK = 512  # queries that are computed together where there is a window
_MOST_SCORES = 1 << 24  # that are held at a time, as fp32: 64 MiB, and some copies
_MOST_CONVERTED = 1 << 20  # numbers of keys and values that are converted at a time: 4 MiB stay in a core's caches
KvWrite = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    spec: AttentionSpec,
    is_causal: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from q, [B, H, T, D], to k and v, [B, Hkv, S, D].

    Args:
        q: queries; head h looks at the key and value head h // (H / Hkv).
        k: keys.
        v: values.
        mask: [B or 1, H or 1, T or 1, S], boolean or added to the scores; None: none.
        spec: scale and cap.
        is_causal: whether a query sees the keys up to its own place only; without a mask, S being T.
        sinks: see positions.Attend.

    Returns:
        [B, H, T, D].
    """
    if not spec.softcap and q.shape[2] == 1 and q.dtype != torch.float32 and q.device.type == "cpu":
        return _attend_in_fp32(q, k, v, mask, spec, sinks)
    if spec.softcap or sinks is not None:
        return _attend_by_scores(q, k, v, mask, spec, is_causal, sinks)
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads == kv_heads or q.shape[2] > 1 or (mask is not None and mask.shape[1] > 1):
        is_grouped = heads != kv_heads
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=spec.scale, enable_gqa=is_grouped
        )
    # One token's heads that share a key head are computed as if they were its tokens: no key is read twice.
    grouped = q.reshape(len(q), kv_heads, -1, q.shape[3])
    return F.scaled_dot_product_attention(grouped, k, v, mask, scale=spec.scale).view(q.shape)


def _attend_in_fp32(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Do what attend_masked does for one token of every row, in fp32: some rows at a time are converted on the way.

    torch's own attention in bf16 and fp16 packs keys and values for a product of many queries. On two cores of an AMD
    EPYC (Zen 4), 32 rows, 12 heads of 64: 80 keys take 1.4 ms so and 5.3 in bf16 (8.9 in fp16), 300 take 3.5 and 20.
    """
    count = max(1, _MOST_CONVERTED // (2 * k[0].numel()))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()
    parts = []
    for start in range(0, len(q), count):
        rows = slice(start, start + count)
        part = mask if mask is None or len(mask) == 1 else mask[rows]
        query, key, value = (each[rows].float() for each in (q, k, v))
        parts.append(attend_masked(query, key, value, part, spec, sinks=sinks))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(q.dtype)


def _attend_by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    spec: AttentionSpec,
    is_causal: bool,
    sinks: Tensor | None,
) -> Tensor:
    """Do what attend_masked does, with capped scores or sinks: a block of queries at a time, to hold few scores."""
    keys = k.shape[2]
    block = max(1, _MOST_SCORES // (q.shape[0] * q.shape[1] * keys))
    parts = []
    for start in range(0, q.shape[2], block):
        some = q[:, :, start : start + block]
        if is_causal:
            places = torch.arange(keys, device=q.device)
            mask_here: Tensor | None = places <= places[start : start + block, None]
        else:
            mask_here = mask if mask is None or mask.shape[2] == 1 else mask[:, :, start : start + block]
        parts.append(_attend_at_once(some, k, v, mask_here, spec, sinks))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _attend_at_once(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    batch, _, length, size = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, length, size)
    scores = (grouped @ k[:, :, None].transpose(3, 4)).flatten(1, 2).float()  # [B, H, T, S]
    cap = spec.softcap
    scores = cap * torch.tanh(scores * (spec.scale / cap)) if cap else scores * spec.scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = (scores - torch.logaddexp(scores.logsumexp(-1, True), sinks[:, None, None])).exp_()
    weights = weights.to(v.dtype).view(batch, k.shape[1], -1, length, k.shape[2])
    return (weights @ v[:, :, None]).view(q.shape)


def within_rows(
    rows: Rows, spec: AttentionSpec, like: Tensor, is_causal: bool, scores: list[Tensor] | None = None
) -> Callable[..., Tensor]:
    """Prepare attention of packed rows, of known lengths, to themselves; see Ops.encoder_attention."""
    mask: Tensor | None = None
    windowed = _InWindow(spec, like.device) if is_causal and 0 < spec.window < rows.longest else None
    chunk = spec.chunk if is_causal and 0 < spec.chunk < rows.longest else 0
    if spec.bias:
        steps = torch.arange(rows.longest, device=like.device)
        is_seen = (steps <= steps[:, None]) | (not is_causal)
        mask = biased(is_seen[None, None], spec.bias(steps[None], steps[None]), like)

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        is_plain = mask is None and sinks is None and not (windowed or chunk or spec.softcap)
        if is_causal and is_plain and has_flash_kernel(q):
            return flash_rows(q, k, v, rows, spec.scale)
        assert rows.lengths, "only the Triton kernels read the lengths on the device"
        out, all_weights = torch.empty_like(q), []
        parts = zip(*(torch.split(each, rows.lengths, 2) for each in (q, k, v, out)), strict=True)
        for length, (query, key, value, target) in zip(rows.lengths, parts, strict=True):
            own = None if mask is None else mask[..., :length, :length]
            if windowed:
                windowed.attend(query, key, value, target, sinks)
            elif chunk:
                each_chunk = (torch.split(each, chunk, 2) for each in (query, key, value, target))
                for q_in, k_in, v_in, out_in in zip(*each_chunk, strict=True):
                    out_in[:] = attend_masked(q_in, k_in, v_in, None, spec, is_causal=True, sinks=sinks)
            elif scores is None:
                target[:] = attend_masked(query, key, value, own, spec, is_causal and own is None, sinks)
            else:
                products = (query @ key.transpose(2, 3)).float() * spec.scale
                weights = (products if own is None else products + own).softmax(-1)
                target[:] = weights.to(value.dtype) @ value
                all_weights.append(F.pad(weights, (0, rows.longest - length) * 2))
        if scores is not None:
            scores.append(torch.cat(all_weights))
        return out

    return attend


class _InWindow:
    """Causal attention of a row to itself within a window: a block of queries at a time looks at what it sees."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        assert spec.bias is None, "no family has a window and a bias"
        self._spec, self._steps = spec, torch.arange(_WINDOW_BLOCK + spec.window, device=device)
        self._masks: dict[int, Tensor] = {}  # by the keys before a block's first query

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """Attend from q, [1, H, T, D], to k and v, [1, Hkv, T, D]; out is of q's shape."""
        for start in range(0, q.shape[2], _WINDOW_BLOCK):
            before = min(start, self._spec.window - 1)
            seen, own = slice(start - before, start + _WINDOW_BLOCK), slice(start, start + _WINDOW_BLOCK)
            query, key, value = q[:, :, own], k[:, :, seen], v[:, :, seen]
            mask = self._mask(before)[: query.shape[2], : key.shape[2]]
            out[:, :, own] = attend_masked(query, key, value, mask[None, None], self._spec, sinks=sinks)

    def _mask(self, before: int) -> Tensor:
        if before not in self._masks:
            keys, queries = self._steps[: before + _WINDOW_BLOCK], self._steps[before : before + _WINDOW_BLOCK, None]
            self._masks[before] = (keys <= queries) & (keys > queries - self._spec.window)
        return self._masks[before]


def biased(is_seen: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
    """Make the attention mask: the bias where a key is seen, minus infinity elsewhere; boolean where there is none."""
    if bias is None:
        return is_seen
    mask = bias.masked_fill(~is_seen, -math.inf).to(like.dtype)
    length = mask.shape[-1]
    # A GPU's attention takes rows that begin at multiples of 16 bytes; others are copied in every layer.
    return F.pad(mask, (0, -length % 8))[..., :length] if mask.is_cuda and length % 8 else mask


def has_flash_kernel(q: Tensor) -> bool:
    """Return whether torch has a flash attention kernel for packed rows of such heads, [..., D]."""
    return q.is_cuda and q.dtype != torch.float32 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def flash_rows(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
    """Attend causally within packed rows by torch's flash attention kernel, [1, H, T, D] each."""
    parts = [x[0].transpose(0, 1) for x in (q, k, v)]
    ends, longest = rows.ends, rows.longest
    out = torch.ops.aten._flash_attention_forward(*parts, ends, ends, longest, longest, 0.0, True, False, scale=scale)
    return out[0].transpose(0, 1)[None]  # type: ignore[no-any-return]
