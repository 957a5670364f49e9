"""Which decode steps run all their layers in one call: those of plain layers, on a CPU that has kernels in C.

A layer is plain if nothing but what ``_KNOWN`` lists differs from a record's defaults: what a record gains later makes
its layers run one by one until it is listed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import MISSING, fields
from typing import Any

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

# Of each record, the fields that the call in C follows, and of a stack those that AttentionSpec says in their place.
_KNOWN: dict[type[Any], set[str]] = {
    Stack: {
        *("head_num", "kv_head_num", "size_per_head", "inter_size", "num_layer", "model_width"),
        *("layernorm_eps", "is_rms", "has_zero_centred_norms", "activation", "is_gated"),
        *("scales_attention", "attention_scalar", "attention_multiplier", "attn_softcap", "windows", "chunks"),
        *("positions", "rotary_dim", "rotates_pairs", "ropes"),
    },
    LayerWeights: {"input_norm", "attention", "post_norm", "feed_forward"},
    GroupedWeights: {"qkv", "out", "size_per_head", "group"},
    DenseWeights: {"into", "gate", "out", "activation"},
    Norm: {"weight", "bias", "eps", "is_rms"},
}


def whole_step(
    stack: Stack, weights: StackWeights | None, comm: Comm, ops: Ops, specs: Collection[AttentionSpec], like: Tensor
) -> HostLayers | None:
    """Prepare a stack's layers, if all are plain and attend alike; None: they run one by one, see run_layer."""
    kernels = host_kernels() if type(ops) is HostOps and not comm.is_split else None
    if not kernels or not weights or not weights.layers or len(specs) != 1 or not _says_no_more(stack, Stack):
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
    if type(attention) is not GroupedWeights or type(block) is not DenseWeights:
        return None
    if not all(_says_no_more(each, type(each)) for each in (layer, attention, block, *filter(None, norms))):
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


def _says_no_more(record: Any, kind: type[Any]) -> bool:
    """Return whether all that a kind's fields say in a record beside what is known is their default."""
    others = [each for each in fields(kind) if each.name not in _KNOWN[kind]]
    return all(_is(getattr(record, each.name), each.default) for each in others)


def _is(value: Any, default: Any) -> bool:
    if default is MISSING or isinstance(value, Tensor):
        return False
    return value is default or bool(value == default)


def _in_fp32(norm: Norm | None) -> Norm | None:
    return norm if norm and norm.weight.dtype == torch.float32 else None
