"""The operations on an NVIDIA GPU: Triton's kernels where a profile has shown a gain, torch and cuBLASLt elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import Array
from ..cache.kv_cache import PAGE, KvCache
from .adapted_rows import AdaptedRows
from .experts import Experts
from .kernels import (
    decode_attention,
    elementwise,
    expert_choice,
    few_experts,
    grouped_decode,
    grouped_gemm,
    grouped_prefill,
    kv_write,
    low_rank,
    prefill_attention,
    row_blocks,
    row_plan,
    sampling,
)
from .linear import HeadNorms, Norm
from .logits import DrawLimits
from .ops import Ops
from .packed_rows import Rows
from .positions import Attend, AttentionSpec, CrossAttend
from .routing import Router
from .torch_attention import flash_rows, has_flash_kernel
from .triton_latent import TritonLatentOps
from .triton_products import TritonProducts
from .triton_states import TritonDraftedStates, TritonStateRows


class TritonOps(TritonProducts):
    """See Ops for what each method does."""

    can_capture = can_capture_experts = True
    is_head_major = has_norms_in_products = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        by_torch = Ops(device)
        self.latent = TritonLatentOps(
            self.norm, by_torch.kv_write, by_torch.extend_attention, by_torch.decode_attention
        )

    def adapted_rows(self, adapters: Tensor, count: int, known: Array | None = None) -> AdaptedRows:
        return low_rank.SortedRows(adapters, count)

    def choose_by(self, router: Router, products: Tensor) -> tuple[Tensor, Tensor]:
        return expert_choice.choose(router, products)

    def run_experts(
        self,
        layer: Experts,
        x: Tensor,
        chosen: Tensor,
        counts: Tensor,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        is_whole = (layer.into.scales is None or layer.into.is_packed) and layer.first is None
        is_few = is_whole and few_experts.is_few(layer, *chosen.shape)
        if norm and not (is_few and norm.is_rms):
            x, norm = self.norm(x, norm), None
        if is_few:
            return few_experts.run_experts(layer, x, chosen, counts, norm, residual)
        return grouped_gemm.run_experts(layer, x, chosen, counts, residual)

    def state_rows(self, states: Tensor, rows: Rows | None) -> TritonStateRows:
        return TritonStateRows(states, rows)

    def drafted_states(self, states: Tensor, rows: Rows) -> TritonDraftedStates:
        return TritonDraftedStates(states, rows)

    def embed(self, ids: Tensor, positions: Tensor, tokens: Tensor, table: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See Ops; on a GPU both tables have the type of the result."""
        return elementwise.embed(ids, positions, tokens, table)

    def argmax_step(self, logits: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        return sampling.argmax_step(logits, ids, positions)

    def draw_limits(
        self,
        slots: Tensor,
        seeds: Tensor,
        generated: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        temperature: Tensor | None = None,
    ) -> DrawLimits:
        return sampling.draw_limits(slots, seeds, generated, top_k, top_p, temperature)

    def draw_tokens(self, logits: Tensor, rows: Tensor, limits: DrawLimits) -> Tensor:
        return sampling.draw_tokens(logits, rows, limits)

    def keep_allowed(self, logits: Tensor, rows: Tensor | None, bits: Tensor) -> Tensor:
        """See Ops; the logits are overwritten."""
        return sampling.keep_allowed(logits, rows, bits)

    def kv_write(self, kv: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        kv_write.kv_write(k, v, kv, pages, offsets)

    def encoder_attention(self, rows: Rows, spec: AttentionSpec, like: Tensor, scores: list[Tensor] | None) -> Attend:
        if scores is not None:
            return super().encoder_attention(rows, spec, like, scores)
        packed, bias = _pack(rows, rows.longest), spec.bias.by_offset if spec.bias else None

        def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor, sinks: Tensor | None) -> Tensor:
            assert sinks is None, "no encoder has sinks"
            return prefill_attention.attend_rows(q[0], k[0], v[0], packed, spec.scale, bias)[None]

        return self._with_norms(attend)

    def prefill_attention(self, cache: KvCache, rows: Rows, spec: AttentionSpec, like: Tensor) -> Attend:
        packed, bias = _pack(rows, rows.longest), spec.bias.by_offset if spec.bias else None
        pages, offsets = cache.page_tables[rows.slots, rows.positions // PAGE], rows.positions % PAGE
        is_uncut = not spec.softcap and not 0 < spec.reach < rows.longest

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            kv: Tensor,
            norms: HeadNorms | None = None,
            sinks: Tensor | None = None,
        ) -> Tensor:
            query, key, value = kv_write.rotate_and_write(
                q[0], k[0], v[0], kv, pages, offsets, rows.positions, spec.rotary, norms
            )
            is_plain = sinks is None and is_uncut
            # torch's flash attention is faster for short rows of wide heads.
            if is_plain and bias is None and q.shape[-1] > 128 and rows.longest <= 512 and has_flash_kernel(q):
                return flash_rows(query[None], key[None], value[None], rows, spec.scale)
            if is_plain and q.shape[1] == k.shape[1]:
                return prefill_attention.attend_rows(query, key, value, packed, spec.scale, bias, is_causal=True)[None]
            return grouped_prefill.attend_group_rows(query, key, value, packed, spec, sinks=sinks)[None]

        return attend

    def extend_attention(self, cache: KvCache, rows: Rows, longest: int, spec: AttentionSpec, like: Tensor) -> Attend:
        """See Ops; torch's for rows with a bias, and where rows keep their last tokens only.

        Such a row's new tokens overwrite what those before them see.
        """
        if spec.bias or cache.has_windows:
            return super().extend_attention(cache, rows, longest, spec, like)
        packed = _pack(rows, longest)
        pages, offsets = cache.page_tables[rows.slots, rows.positions // PAGE], rows.positions % PAGE
        tables, slots, positions = cache.page_tables, rows.slots, rows.positions

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            kv: Tensor,
            norms: HeadNorms | None = None,
            sinks: Tensor | None = None,
        ) -> Tensor:
            q, _, _ = kv_write.rotate_and_write(q[0], k[0], v[0], kv, pages, offsets, positions, spec.rotary, norms)
            return grouped_prefill.extend(q, kv, tables, slots, positions, packed, spec, sinks=sinks)[None]

        return attend

    def decode_attention(
        self, positions: Tensor, tables: Tensor, windows: Tensor, spec: AttentionSpec, like: Tensor
    ) -> Attend:
        bias = spec.bias.by_distance if spec.bias else None
        is_plain, plan = not (spec.softcap or spec.reach), None

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            kv: Tensor,
            norms: HeadNorms | None = None,
            sinks: Tensor | None = None,
        ) -> Tensor:
            nonlocal plan
            if norms or sinks is not None or not is_plain or q.shape[1] != k.shape[1]:
                plan = row_plan.plan_rows(positions, windows) if plan is None else plan
                return grouped_decode.attend_groups(q, k, v, kv, tables, plan, spec, norms, sinks)
            return decode_attention.attend(q, k, v, kv, tables, positions, windows, spec.scale, bias, spec.rotary)

        return attend

    def cross_attention(self, tables: Tensor, lengths: Tensor, scale: float) -> CrossAttend:

        def attend(q: Tensor, kv: Tensor) -> Tensor:
            if q.shape[2] > 1:
                return attend(q.transpose(0, 2), kv).transpose(0, 2)
            # With a window of its length, all of a row is seen.
            return decode_attention.attend(q, None, None, kv, tables, lengths, lengths, scale)

        return attend

    def warm_up_sampling(self, vocab_size: int) -> None:
        sampling.warm_up(vocab_size, self._device)


def _pack(rows: Rows, longest: int) -> row_blocks.PackedRows:
    return row_blocks.PackedRows(rows.ends, len(rows.ids), longest, rows.several)
