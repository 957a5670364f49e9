"""What a network computes with: one object, chosen when a model is loaded, whose methods are all its operations.

``Ops`` has every operation in torch: for a CPU, and for a GPU on which Triton cannot compile. ``triton_ops.TritonOps``
replaces the operations for which a profile on an NVIDIA GPU has shown a gain from our own kernel. The network and the
sampler call these methods without regard to the implementation.

B: rows of a call; T: tokens of all of them together; H: heads; D: size of a head; V: vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..arrays import Array
from ..cache.kv_cache import PAGE, KvCache
from . import cached_attention, experts, torch_attention
from .adapted_rows import AdaptedRows, GroupedRows
from .cached_attention import WithoutNorms
from .drafted_states import DraftedStates, TorchDraftedStates
from .draws import Draws
from .experts import Experts
from .fp8 import StaticLinear
from .latent_attention import LatentOps, LatentUp
from .linear import ACTIVATIONS, HeadNorms, Linear, Norm
from .packed_rows import Rows
from .positions import Attend, AttentionSpec, CrossAttend
from .routing import Router, choose
from .state_rows import StateRows


class Ops(Draws):
    """The operations of a network on one device.

    A method that prepares attention is called once in a step, and the function that it returns in every layer. ``spec``
    has the scale, bias and rotary embedding; ``like`` gives device and type of keys.

    Attributes:
        can_capture: whether steps can be captured as CUDA graphs: no operation reads a value on the host.
        can_capture_experts: whether those of experts can, which torch's sort of rows by expert needs counts for.
        has_norms_in_products: whether a product of one row norms its input at no cost.
        is_head_major: how the cache lays out a page, see cache.sizing.CacheShape.
        latent: latent attention.
    """

    can_capture = False
    can_capture_experts = False
    has_norms_in_products = False
    is_head_major = False

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_cublas = device, device.type == "cuda"
        self.latent = LatentOps(self.norm, self.kv_write, self.extend_attention, self.decode_attention)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalize x, [..., width]; the norm's weight may be fp32 where x is not."""
        if norm.weight.dtype != x.dtype:
            return self.norm(x.float(), norm).to(x.dtype)
        if norm.is_rms:
            return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)

    def linear(
        self,
        linear: Linear,
        x: Tensor,
        norm: Norm | None = None,
        activation: str = "",
        residual: Tensor | None = None,
    ) -> Tensor:
        """Compute residual + activation(norm(x) @ weight.T + bias), [..., in] -> [..., out].

        Args:
            linear: weight and bias.
            x: [..., in].
            norm: of x; None: none.
            activation: gelu (by tanh), exact_gelu, relu, squared_relu, silu or nothing.
            residual: [..., out], contiguous; is overwritten with the result. None: nothing is added.
        """
        x = self.norm(x, norm) if norm else x
        if isinstance(linear, StaticLinear):
            y = ACTIVATIONS[activation](linear.by(partial(self.linear, linear.linear), x))
        elif not (self._has_cublas and linear.has_kernels) or x.dtype == torch.float32 or linear.rounds:
            y = ACTIVATIONS[activation](linear(x))
        elif residual is not None and linear.bias is None and not activation:
            rows = residual.view(-1, len(linear.weight))
            torch.addmm(rows, x.reshape(-1, x.shape[-1]), self._matrix(linear, x.dtype).T, out=rows)
            return residual
        else:
            y = self._by_cublas(linear, x, activation)
        if residual is None:
            return y
        residual += y
        return residual

    def gated_linear(
        self,
        linear: Linear,
        gate: Linear,
        x: Tensor,
        norm: Norm | None = None,
        activation: str = "",
        then: Linear | None = None,
    ) -> Tensor:
        """Compute activation(norm(x) @ linear) * (norm(x) @ gate), each with its bias; [..., in] -> [..., out].

        Args:
            linear: what is activated (a Llama's gate_proj).
            gate: what it is multiplied by (a Llama's up_proj).
            x: [..., in].
            norm: of x; None: none.
            activation: see linear.
            then: what alone multiplies the result, if it has an ``input_gate``. Where it rounds its input, both
                products may be returned side by side, [..., 2 out], for it to gate.
        """
        x = self.norm(x, norm) if norm else x
        y = self.linear(linear, x, activation=activation)
        y *= self.linear(gate, x)
        return y

    def gate_halves(self, y: Tensor, activation: str) -> Tensor:
        """Compute activation(first half) * second half of the last axis; y may be overwritten."""
        first, second = y.chunk(2, -1)
        return ACTIVATIONS[activation](first) * second

    def latent_up(self, up: LatentUp) -> LatentUp:
        """Return what makes keys and values of latent vectors of a call's tokens."""
        return up

    def adapted_rows(self, adapters: Tensor, count: int, known: Array | None = None) -> AdaptedRows:
        """Sort the tokens of a call by adapter.

        Args:
            adapters: int64 [T], place of each token's adapter; ``count``: it has none.
            count: places.
            known: the same on the host; None while a step is captured.
        """
        return GroupedRows(adapters.cpu().numpy() if known is None else known, count, adapters.device)

    def of_tokens(self, tokens: slice) -> Ops:
        """Return the operations of some of a call's tokens."""
        return self

    def _by_cublas(self, linear: Linear, x: Tensor, activation: str) -> Tensor:
        """Compute activation(linear(x)); cuBLASLt applies gelu or relu before it rounds."""
        flat, matrix = x.reshape(-1, x.shape[-1]), self._matrix(linear, x.dtype)
        if activation in ("gelu", "relu"):
            y = torch._addmm_activation(linear.bias_or_zeros(x), flat, matrix.T, use_gelu=activation == "gelu")
        else:
            y = ACTIVATIONS[activation](F.linear(flat, matrix, linear.bias))
        return y.view(*x.shape[:-1], len(matrix))

    def _matrix(self, linear: Linear, dtype: torch.dtype) -> Tensor:
        """Return what is multiplied, [out, in], in a type."""
        return linear.matrix(dtype)

    def partial_linear(self, linear: Linear, x: Tensor) -> Tensor:
        """Compute one rank's summand of a row-parallel product: in fp32 where that costs nothing, else in x's type."""
        return linear(x)

    def linear_fp32(self, linear: Linear, x: Tensor, norm: Norm | None = None, out: Tensor | None = None) -> Tensor:
        """Compute norm(x) @ weight.T + bias in fp32, whatever the types of x and the weight are.

        Args:
            linear: the weight, [out, in], and the bias.
            x: [..., in].
            norm: of x; None: there is none.
            out: fp32 [..., out], contiguous, that is overwritten and returned; None: a new tensor is.
        """
        x = self.norm(x, norm) if norm else x
        if linear.panels or linear.weight.dtype == torch.float32:
            y = linear(x.float())
            return y if out is None else out.copy_(y)
        flat, to = x.reshape(-1, x.shape[-1]), None if out is None else out.view(-1, out.shape[-1])
        y = torch.mm(flat, self._matrix(linear, x.dtype).T, out_dtype=torch.float32, out=to).view(*x.shape[:-1], -1)
        return y if linear.bias is None else y.add_(linear.bias)

    def choose_experts(self, router: Router, x: Tensor, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of rows, [N, hidden], normed first; see routing.choose."""
        return self.choose_by(router, self.linear_fp32(router.linear, x, norm))

    def choose_by(self, router: Router, products: Tensor) -> tuple[Tensor, Tensor]:
        """See routing.choose."""
        return choose(router, products)

    def run_experts(
        self,
        layer: Experts,
        x: Tensor,
        chosen: Tensor,
        counts: Tensor,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Sum what each token's experts compute of it, normed first; see experts.run_experts.

        Args:
            layer: its experts.
            x: [N, hidden].
            chosen: int64 [N, used].
            counts: fp32 [N, used].
            norm: of x; None: there is none.
            residual: [N, hidden], contiguous, that the sum is added to in place, and that is returned; may be x.
        """
        found = experts.run_experts(layer, self.norm(x, norm) if norm else x, chosen, counts)
        return found if residual is None else residual.add_(found)

    def state_rows(self, states: Tensor, rows: Rows | None) -> StateRows:
        """Return the states of a call's rows, for all layers; see StateRows."""
        return StateRows(states, rows)

    def drafted_states(self, states: Tensor, rows: Rows) -> DraftedStates:
        """Return the states of a call's rows, of which some run drafts, for all layers; see DraftedStates."""
        return TorchDraftedStates(states, rows)

    def embed(self, ids: Tensor, positions: Tensor, tokens: Tensor, table: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Look up the next token of each row and its position, and add them.

        Args:
            ids: int64 [B].
            positions: int64 [B]; one beyond the table's last row counts as the last.
            tokens: [V, hidden].
            table: [positions, hidden], or None.
            dtype: of the result; on a GPU both tables have it.

        Returns:
            [B, hidden].
        """
        x = F.embedding(ids, tokens).to(dtype)
        return x if table is None else x + F.embedding(positions.clamp(max=len(table) - 1), table)

    def kv_write(self, kv: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v, [H, T, D], to the pages, int32 [T], and offsets, int64 [T], of a layer's cache."""
        cached_attention.write_entries(kv, pages * PAGE + offsets, k.transpose(0, 1), v.transpose(0, 1))

    def encoder_attention(self, rows: Rows, spec: AttentionSpec, like: Tensor, scores: list[Tensor] | None) -> Attend:
        """Prepare attention of whole rows to themselves, in both directions.

        Every call appends its attention weights, fp32 [B, H, S, S], to ``scores``, if that is not None.
        """
        return self._with_norms(torch_attention.within_rows(rows, spec, like, is_causal=False, scores=scores))

    def prefill_attention(self, cache: KvCache, rows: Rows, spec: AttentionSpec, like: Tensor) -> Attend:
        """Prepare causal attention of new rows to themselves; each call writes keys and values to the cache."""
        attend = torch_attention.within_rows(rows, spec, like, is_causal=True)
        pages, offsets = cache.page_tables[rows.slots, rows.positions // PAGE], rows.positions % PAGE
        rotate = spec.rotation(rows.positions[None], like)

        def write_and_attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
            q, k = (rotate(q), rotate(k)) if rotate else (q, k)
            self.kv_write(kv, pages, offsets, k[0], v[0])
            return attend(q, k, v, None, sinks)

        return self._with_norms(write_and_attend)

    def extend_attention(self, cache: KvCache, rows: Rows, longest: int, spec: AttentionSpec, like: Tensor) -> Attend:
        """Prepare causal attention of rows that continue what their slots hold, several tokens of each.

        The lengths of the rows are known, and none has more tokens than its window. ``longest`` is at least the number
        of entries of each row. Each call writes keys and values to the cache.
        """
        return self._with_norms(cached_attention.extend_rows(cache, rows, longest, spec, like, self.kv_write))

    def decode_attention(
        self, positions: Tensor, tables: Tensor, windows: Tensor, spec: AttentionSpec, like: Tensor
    ) -> Attend:
        """Prepare attention of one token of each row; each call writes its key and value to the cache.

        The token's positions and the rows' windows are int64 [B], the page tables int32 [B, width].
        """
        return cached_attention.decode_rows(positions, tables, windows, spec, like, self.norm)

    def _with_norms(self, attend: WithoutNorms) -> Attend:
        """Make attention that takes no norms take them."""

        def norm_and_attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            kv: Tensor,
            norms: HeadNorms | None = None,
            sinks: Tensor | None = None,
        ) -> Tensor:
            q, k = (self.norm(q, norms.query), self.norm(k, norms.key)) if norms else (q, k)
            return attend(q, k, v, kv, sinks)

        return norm_and_attend

    def cross_attention(self, tables: Tensor, lengths: Tensor, scale: float) -> CrossAttend:
        """Prepare attention to the cached keys and values of the encoder's output.

        Each row of one token, or each token of packed rows, has a page table, int32 [n, width], and sees as many
        entries as ``lengths`` says, int64 [n].
        """
        view, spec = cached_attention.PagedView(tables, lengths), AttentionSpec(scale)

        def attend(q: Tensor, kv: Tensor) -> Tensor:
            if q.shape[2] > 1:
                return attend(q.transpose(0, 2), kv).transpose(0, 2)
            return view.attend(q, kv, None, spec)

        return attend
