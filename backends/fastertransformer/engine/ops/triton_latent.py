"""Latent attention on an NVIDIA GPU: Triton's kernels in the absorbed form, torch's or Triton's in the plain form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..cache.kv_cache import PAGE, KvCache
from .kernels import latent_decode, latent_entries, latent_prefill, prefill_attention, row_blocks, row_plan
from .latent_attention import LatentAttend, LatentOps, LatentUp
from .packed_rows import Rows
from .positions import AttentionSpec
from .torch_attention import flash_rows, has_flash_kernel


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
        packed = row_blocks.PackedRows(rows.ends, len(rows.ids), longest, rows.several)
        pages, offsets = cache.page_tables[rows.slots, rows.positions // PAGE], rows.positions % PAGE
        tables, slots, positions, rotary = cache.page_tables, rows.slots, rows.positions, spec.rotary
        assert rotary, "latent attention rotates"

        def attend(q: Tensor, narrow: Tensor, up: LatentUp, kv: Tensor) -> Tensor:
            turned = latent_entries.keep(q[0], narrow[0], up, kv, pages, offsets, positions, rotary)
            absorbed = torch.bmm(q[0, :, :, : up.plain_size], up.keys)
            attended = latent_prefill.extend_latent(turned, absorbed, kv, tables, slots, positions, packed, spec.scale)
            return torch.bmm(attended, up.values.mT)[None]

        return attend

    def decode_attention(
        self, positions: Tensor, tables: Tensor, windows: Tensor, spec: AttentionSpec, like: Tensor
    ) -> LatentAttend:
        entries, plan, rotary = positions % windows, row_plan.plan_rows(positions, windows), spec.rotary
        pages, offsets = tables.gather(1, (entries // PAGE)[:, None])[:, 0], entries % PAGE
        assert rotary, "latent attention rotates"

        def attend(q: Tensor, narrow: Tensor, up: LatentUp, kv: Tensor) -> Tensor:
            heads = q[:, :, 0].transpose(0, 1)
            turned = latent_entries.keep(heads, narrow[:, 0], up, kv, pages, offsets, positions, rotary)
            absorbed = torch.bmm(heads[..., : up.plain_size], up.keys)
            attended = latent_decode.attend_latent(turned, absorbed, kv, tables, plan, spec.scale)
            return torch.bmm(attended, up.values.mT).transpose(0, 1)[:, :, None]

        return attend
