"""Latent attention on an NVIDIA GPU: Triton's kernels in the absorbed form, torch's or Triton's in the plain form."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..arrays import Array
from ..cache.kv_cache import PAGE, KvCache
from .kernels import latent_decode, latent_entries, latent_prefill, prefill_attention, row_blocks, row_plan
from .latent_attention import LatentAttend, LatentOps, LatentUp
from .latent_continued import ContinuedRows, long_rows
from .packed_rows import Rows
from .positions import AttentionSpec
from .torch_attention import flash_rows, has_flash_kernel


class _Absorbed(NamedTuple):
    """Attention of rows that continue what their slots hold, in the absorbed form."""

    cache: KvCache
    rows: Rows
    packed: row_blocks.PackedRows
    scale: float

    @classmethod
    def of(cls, cache: KvCache, rows: Rows, longest: int, scale: float) -> _Absorbed:
        return cls(cache, rows, row_blocks.PackedRows(rows.ends, len(rows.ids), longest, rows.several), scale)

    def attend(self, turned: Tensor, q: Tensor, up: LatentUp, kv: Tensor) -> Tensor:
        """Attend from turned, [T, H, R], and q, [H, T, P + R], to the rows' pages: [H, T, V]."""
        absorbed, rows = up.absorbed(q[..., : up.plain_size]), self.rows
        attended = latent_prefill.extend_latent(
            turned, absorbed, kv, self.cache.page_tables, rows.slots, rows.positions, self.packed, self.scale
        )
        return up.released(attended)


class TritonLatentOps(LatentOps):
    """See LatentOps for what each method does."""

    can_capture = True

    def _within(self, rows: Rows, spec: AttentionSpec, like: Tensor) -> Callable[..., Tensor]:
        packed = row_blocks.PackedRows(rows.ends, len(rows.ids), rows.longest, rows.several)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if has_flash_kernel(q):
                return flash_rows(q, k, v, rows, spec.scale)
            return prefill_attention.attend_rows(q[0], k[0], v[0], packed, spec.scale, is_causal=True)[None]

        return attend

    def extend_attention(
        self, cache: KvCache, rows: Rows, longest: int, spec: AttentionSpec, like: Tensor
    ) -> LatentAttend:
        """See LatentOps; torch's where rows keep their last tokens only, as TritonOps does."""
        if cache.has_windows:
            return super().extend_attention(cache, rows, longest, spec, like)
        pages, offsets = cache.page_tables[rows.slots, rows.positions // PAGE], rows.positions % PAGE
        positions, rotary = rows.positions, spec.rotary
        assert rotary, "latent attention rotates"
        every, rest = _Absorbed.of(cache, rows, longest, spec.scale), None
        if chosen := long_rows(rows.starts, rows.lengths) if rows.starts and rows.lengths else []:
            continued = ContinuedRows(rows, chosen, cache.page_tables, spec.scale)
            rest = continued.rest and _Absorbed.of(cache, continued.rest, longest, spec.scale)

        def attend(q: Tensor, narrow: Tensor, up: LatentUp, kv: Tensor) -> Tensor:
            turned = latent_entries.keep(q[0], narrow[0], up, kv, pages, offsets, positions, rotary)
            if not chosen or type(up) is not LatentUp:  # another kind does more than to multiply by its matrix
                return every.attend(turned, q[0], up, kv)[None]
            out = q.new_empty(q.shape[1], q.shape[2], up.matrix.shape[1] - up.plain_size)
            continued.attend(turned, q[0], up, kv, out)
            if rest:
                others = continued.of_rest
                out[:, others] = rest.attend(turned[others], q[0, :, others], up, kv)
            return out[None]

        return attend

    def continues_plainly(self, starts: Array, lengths: Array) -> bool:
        """See LatentOps."""
        return bool(long_rows(starts.tolist(), lengths.tolist()))

    def decode_attention(
        self, positions: Tensor, tables: Tensor, windows: Tensor, spec: AttentionSpec, like: Tensor
    ) -> LatentAttend:
        entries, plan, rotary = positions % windows, row_plan.plan_rows(positions, windows), spec.rotary
        pages, offsets = tables.gather(1, (entries // PAGE)[:, None])[:, 0], entries % PAGE
        assert rotary, "latent attention rotates"

        def attend(q: Tensor, narrow: Tensor, up: LatentUp, kv: Tensor) -> Tensor:
            heads = q[:, :, 0].transpose(0, 1)
            turned = latent_entries.keep(heads, narrow[:, 0], up, kv, pages, offsets, positions, rotary)
            absorbed = up.absorbed(heads[..., : up.plain_size])
            attended = latent_decode.attend_latent(turned, absorbed, kv, tables, plan, spec.scale)
            return up.released(attended).transpose(0, 1)[:, :, None]

        return attend
