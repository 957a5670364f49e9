"""A layer of either stack, whatever its family: its blocks, their norms, and the residual stream around them.

B: rows of a call; T: tokens of this call; H: heads in this process; D: size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.states import LayerState
from ..ops.linear import Linear, Norm
from .blocks.attention import join_heads, split_heads
from .blocks.context import LayerContext
from .blocks.mixture import MixtureWeights
from .config import Stack
from .layouts import CrossWeights, LayerWeights


def run_layer(
    stack: Stack, layer: LayerWeights, x: Tensor, context: LayerContext, kv: Tensor, state: LayerState | None = None
) -> Tensor:
    """Run a layer on x, [B, T, hidden], which is overwritten; kv and state: what the cache keeps of it."""
    if stack.is_parallel:
        return _run_parallel(stack, layer, x, context, kv)
    ops, comm, norms, none = context.ops, context.comm, (layer.input_norm, layer.post_norm), (None, None)
    before, after = (norms, none) if stack.is_pre_norm else (none, norms)
    if state:
        x = _mix(stack, layer, x, before[0], context, kv, state)
    elif layer.attention:
        attended = layer.attention.inner(x, before[0], context, kv)
        x = _add_product(stack, x, layer.attention.out, attended, context, layer.attention_output_norm)
    x = ops.norm(x, after[0]) if after[0] else x
    if layer.cross:
        x = comm.all_reduce_add(x, layer.cross.out, _attend_source(stack, layer.cross, x, context, kv))
    if layer.feed_forward:
        out, factor = layer.feed_forward.out, stack.multipliers.down
        is_sum = not (comm.is_split or layer.mlp_output_norm) and stack.residual_multiplier * factor == 1
        if is_sum and isinstance(layer.feed_forward, MixtureWeights):
            x = layer.feed_forward.add_to(x, before[1], context)
        else:
            inner = layer.feed_forward.inner(x, before[1], context, out)
            x = _add_product(stack, x, out, inner, context, layer.mlp_output_norm, factor)
    return ops.norm(x, after[1]) if after[1] else x


def _mix(
    stack: Stack,
    layer: LayerWeights,
    x: Tensor,
    norm: Norm | None,
    context: LayerContext,
    kv: Tensor,
    state: LayerState,
) -> Tensor:
    """Run what has a state, and the attention beside it if there is one, on the same input."""
    assert layer.state_mixer
    factors, behind = stack.multipliers, layer.attention_output_norm
    given = _multiplied(x, norm, factors.mamba_in, context)
    parts = [(layer.state_mixer.out, layer.state_mixer.inner(*given, context, state), factors.mamba_out)]
    if layer.attention:
        given = _multiplied(x, norm, factors.attention_in, context)
        parts.append((layer.attention.out, layer.attention.inner(*given, context, kv), factors.attention_out))
    for out, inner, factor in parts:
        x = _add_product(stack, x, out, inner, context, behind, factor)
    return x


def _multiplied(x: Tensor, norm: Norm | None, factor: float, context: LayerContext) -> tuple[Tensor, Norm | None]:
    """Multiply a block's input, normed first; returns the input, and the norm that is left to do."""
    if factor == 1:
        return x, norm
    return (context.ops.norm(x, norm) if norm else x) * factor, None


def _add_product(
    stack: Stack,
    x: Tensor,
    linear: Linear | None,
    inner: Tensor,
    context: LayerContext,
    norm: Norm | None,
    factor: float = 1.0,
) -> Tensor:
    """Add a row-parallel product, and its norm if it has one, to the residual stream x, which is overwritten.

    Where there is no product, ``inner`` is this process's part of the sum.
    """
    multiplier = stack.residual_multiplier * factor
    if not norm and multiplier == 1:
        return context.comm.all_reduce_add(x, linear, inner, context.ops)
    added = context.comm.all_reduce_add(torch.zeros_like(x), linear, inner, context.ops)
    return x.add_(context.ops.norm(added, norm) if norm else added, alpha=multiplier)


def _run_parallel(stack: Stack, layer: LayerWeights, x: Tensor, context: LayerContext, kv: Tensor) -> Tensor:
    """Run attention and MLP on the same input (GPT-J, GPT-NeoX)."""
    assert layer.attention and layer.feed_forward
    normed, first, second = x, layer.input_norm, layer.post_norm
    assert first
    attention_norm: Norm | None = first
    if not second:  # one norm for both; a product of one row norms its input at no cost
        is_fused = x.shape[:2] == (1, 1)
        normed = x if is_fused else context.ops.norm(x, first)
        attention_norm = second = first if is_fused else None
    attended = layer.attention.inner(normed, attention_norm, context, kv)
    inner = layer.feed_forward.inner(normed, second, context, layer.feed_forward.out)
    x = context.comm.all_reduce_add(x, layer.attention.out, attended, context.ops)
    return context.comm.all_reduce_add(x, layer.feed_forward.out, inner, context.ops)


def _attend_source(stack: Stack, cross: CrossWeights, x: Tensor, context: LayerContext, kv: Tensor) -> Tensor:
    """Attention to the encoder's output, [B, T, hidden] -> [B, T, H * D]."""
    assert context.attend_source
    (q,) = split_heads(context.ops.linear(cross.query, x, cross.norm), 1, stack.size_per_head)
    return join_heads(context.attend_source(q, kv))
