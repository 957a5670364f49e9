"""A layer of either stack, whatever its family: attention and MLP, their norms, and the residual stream around them.

B: rows of a call; T: tokens of this call; S: keys that a row looks at; H, Hkv: heads of queries, and of keys and
values, in this process; D: size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.linear import HeadNorms, Linear, Norm
from ..ops.ops import Ops
from ..ops.positions import Attend, CrossAttend
from ..parallel.comm import Comm
from .config import Stack
from .layouts import CrossWeights, LayerWeights


@dataclass(frozen=True)
class LayerContext:
    """What all layers of a stack share in one call.

    Attributes:
        ops: operations.
        comm: with the processes that share the layers.
        attend: self-attention.
        tasks: [B, T], each token's IA3 task; None: none has one.
        attend_source: attention to the encoder's output; None: there is none.
    """

    ops: Ops
    comm: Comm
    attend: Attend
    tasks: Tensor | None = None
    attend_source: CrossAttend | None = None


def run_layer(stack: Stack, layer: LayerWeights, x: Tensor, context: LayerContext, kv: Tensor) -> Tensor:
    """Run a layer on x, [B, T, hidden], which is overwritten; kv: the layer's cache."""
    if stack.is_parallel:
        return _run_parallel(stack, layer, x, context, kv)
    ops, comm, norms, none = context.ops, context.comm, (layer.input_norm, layer.post_norm), (None, None)
    before, after = (norms, none) if stack.is_pre_norm else (none, norms)
    attended = _attend(stack, layer, x, before[0], context, kv)
    x = _add_product(stack, x, layer.attention_out, attended, context, layer.attention_output_norm)
    x = ops.norm(x, after[0]) if after[0] else x
    if layer.cross:
        x = comm.all_reduce_add(x, layer.cross.out, _attend_source(stack, layer.cross, x, context, kv))
    inner = _mlp(stack, layer, x, before[1], context)
    x = _add_product(stack, x, layer.mlp_out, inner, context, layer.mlp_output_norm)
    return ops.norm(x, after[1]) if after[1] else x


def _add_product(
    stack: Stack, x: Tensor, linear: Linear, inner: Tensor, context: LayerContext, norm: Norm | None
) -> Tensor:
    """Add a row-parallel product, and its norm if it has one, to the residual stream x, which is overwritten."""
    multiplier = stack.residual_multiplier
    if not norm and multiplier == 1:
        return context.comm.all_reduce_add(x, linear, inner)
    added = context.comm.all_reduce_add(torch.zeros_like(x), linear, inner)
    return x.add_(context.ops.norm(added, norm) if norm else added, alpha=multiplier)


def _run_parallel(stack: Stack, layer: LayerWeights, x: Tensor, context: LayerContext, kv: Tensor) -> Tensor:
    """Run attention and MLP on the same input (GPT-J, GPT-NeoX)."""
    normed, first, second = x, layer.input_norm, layer.post_norm
    assert first
    attention_norm: Norm | None = first
    if not second:  # one norm for both; a product of one row norms its input at no cost
        is_fused = x.shape[:2] == (1, 1)
        normed = x if is_fused else context.ops.norm(x, first)
        attention_norm = second = first if is_fused else None
    attended = _attend(stack, layer, normed, attention_norm, context, kv)
    inner = _mlp(stack, layer, normed, second, context)
    x = context.comm.all_reduce_add(x, layer.attention_out, attended)
    return context.comm.all_reduce_add(x, layer.mlp_out, inner)


def _attend(
    stack: Stack, layer: LayerWeights, x: Tensor, norm: Norm | None, context: LayerContext, kv: Tensor
) -> Tensor:
    """Self-attention of this process's heads, [B, T, hidden] -> [B, T, H * D]."""
    q, k, v = _split_qkv(stack, context.ops.linear(layer.qkv, x, norm))
    if layer.query_norm and layer.key_norm:
        if len(layer.query_norm.weight) > stack.size_per_head:
            q, k = (_norm_together(context.ops, *pair) for pair in ((q, layer.query_norm), (k, layer.key_norm)))
            return _join_heads(context.attend(q, k, v, kv))
        if layer.query_norm.is_rms and not layer.ia3:
            return _join_heads(context.attend(q, k, v, kv, HeadNorms(layer.query_norm, layer.key_norm)))
        q, k = context.ops.norm(q, layer.query_norm), context.ops.norm(k, layer.key_norm)
    k, v = scale_by_task(k, layer.ia3, 0, context.tasks), scale_by_task(v, layer.ia3, 1, context.tasks)
    return _join_heads(context.attend(q, k, v, kv))


def _norm_together(ops: Ops, x: Tensor, norm: Norm) -> Tensor:
    """Norm the heads of a token together, [B, H, T, D]."""
    (normed,) = split_heads(ops.norm(_join_heads(x), norm), 1, x.shape[-1])
    return normed


def _attend_source(stack: Stack, cross: CrossWeights, x: Tensor, context: LayerContext, kv: Tensor) -> Tensor:
    """Attention to the encoder's output, [B, T, hidden] -> [B, T, H * D]."""
    assert context.attend_source
    (q,) = split_heads(context.ops.linear(cross.query, x, cross.norm), 1, stack.size_per_head)
    return _join_heads(context.attend_source(q, kv))


def _mlp(stack: Stack, layer: LayerWeights, x: Tensor, norm: Norm | None, context: LayerContext) -> Tensor:
    """Inner layer of the MLP, [B, T, hidden] -> this process's part of [B, T, inter]."""
    if layer.mlp_gate:
        inner = context.ops.gated_linear(layer.mlp_in, layer.mlp_gate, x, norm, stack.activation)
    else:
        inner = context.ops.linear(layer.mlp_in, x, norm, stack.activation)
    if layer.ia3 and context.tasks is not None:
        inner *= layer.ia3[2][context.tasks]
    return inner


def _split_qkv(stack: Stack, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, (H + 2 * Hkv) * D] -> [B, H, T, D] and twice [B, Hkv, T, D]."""
    heads = x.view(*x.shape[:2], -1, stack.size_per_head).transpose(1, 2)
    group = stack.head_num // stack.kv_heads
    kv_heads = heads.shape[1] // (group + 2)
    q, k, v = torch.split(heads, [group * kv_heads, kv_heads, kv_heads], 1)
    return q, k, v


def split_heads(x: Tensor, parts: int, size: int) -> tuple[Tensor, ...]:
    """[B, T, parts * H * D] -> [B, H, T, D] each."""
    return x.view(*x.shape[:2], parts, -1, size).permute(2, 0, 3, 1, 4).unbind()


def _join_heads(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H * D]."""
    return x.transpose(1, 2).flatten(2)


def scale_by_task(x: Tensor, ia3: tuple[Tensor, ...] | None, index: int, tasks: Tensor | None) -> Tensor:
    """Scale keys or values, [B, H, T, D], by the IA3 vectors of their tokens' tasks, [B, T]."""
    if ia3 is None or tasks is None:
        return x
    return x * ia3[index][tasks].view(*tasks.shape, -1, x.shape[-1]).transpose(1, 2)
