"""Which decode steps run all their layers in one call: those of plain layers, on a CPU that has kernels in C."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ..ops.host.attention import can_attend
from ..ops.host.compiled import host_kernels
from ..ops.host.layers import HostLayers, PlainLayer
from ..ops.host.panels import knows
from ..ops.host_ops import HostOps
from ..ops.linear import Norm
from ..ops.ops import Ops
from ..ops.positions import AttentionSpec
from ..parallel.comm import Comm
from .blocks.attention import GroupedWeights
from .blocks.feed_forward import DenseWeights
from .config import Stack
from .layouts import LayerWeights, StackWeights


def whole_step(
    stack: Stack, weights: StackWeights | None, comm: Comm, ops: Ops, specs: Collection[AttentionSpec], like: Tensor
) -> HostLayers | None:
    """Prepare a stack's layers, if all are plain and attend alike; None: they run one by one, see run_layer."""
    kernels = host_kernels() if type(ops) is HostOps and not comm.is_split else None
    is_plain = stack.is_pre_norm and not stack.is_parallel and stack.residual_multiplier == stack.multipliers.down == 1
    is_plain &= not stack.temperature[0]
    if not kernels or not weights or not weights.layers or not is_plain or len(specs) != 1:
        return None
    (spec,), plain = specs, [found for layer in weights.layers if (found := _plain(layer))]
    if not can_attend(spec, like) or not _are_alike(plain, weights):
        return None
    return HostLayers(kernels, plain, spec, stack.size_per_head, stack.activation)


def _are_alike(plain: Sequence[PlainLayer], weights: StackWeights) -> bool:
    shapes = {(layer.qkv.outputs, layer.out.inputs) for layer in plain}
    blocks = [layer.feed_forward for layer in weights.layers]
    activations = {block.activation for block in blocks if isinstance(block, DenseWeights)}
    return len(plain) == len(weights.layers) and len(shapes) == len(activations) == 1 and knows(activations.pop())


def _plain(layer: LayerWeights) -> PlainLayer | None:
    """Return what run_layer multiplies and norms, if it does no more than that."""
    attention, block, norms = layer.attention, layer.feed_forward, (layer.input_norm, layer.post_norm)
    if layer.cross or layer.state_mixer or layer.attention_output_norm or layer.mlp_output_norm:
        return None
    if type(attention) is not GroupedWeights or type(block) is not DenseWeights:
        return None
    if attention.query_norm or attention.key_norm or attention.ia3 or attention.sinks is not None:
        return None
    if attention.is_gated or block.ia3 is not None or block.factor != 1:
        return None
    before, between = map(_in_fp32, norms)
    matrices = [each.panels for each in (attention.qkv, attention.out, block.into, block.out)]
    gate = block.gate.panels if block.gate else None
    if not before or not between or not all(matrices) or bool(gate) != bool(block.gate):
        return None
    qkv, out, into, down = (each for each in matrices if each)
    if gate and not into.is_like(gate):
        return None
    return PlainLayer(before, qkv, out, between, into, gate, down)


def _in_fp32(norm: Norm | None) -> Norm | None:
    return norm if norm and norm.weight.dtype == torch.float32 else None
