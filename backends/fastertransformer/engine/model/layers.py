"""A layer of either stack, whatever its family: attention and MLP, their norms, and the residual stream around them.

B: rows of a call; T: tokens of this call; S: keys that a row looks at; H: heads of this process; D: size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..parallel.comm import Comm
from .config import Stack
from .layouts import CrossWeights, LayerWeights
from .linear import Norm


@dataclass(frozen=True)
class Call:
    """What all layers of a stack share in one call.

    Attributes:
        attend: q, k, v (and the layer's part of the cache) -> attended, [B, H, T, D] each.
        tasks: [B, T], each token's IA3 task; None: none has one.
        attend_source: q and the layer's part of the cache -> attended, to what was kept of the encoder's output.
    """

    attend: Callable[..., Tensor]
    tasks: Tensor | None = None
    attend_source: Callable[[Tensor, Tensor], Tensor] | None = None


def run_layer(
    stack: Stack, layer: LayerWeights, x: Tensor, call: Call, comm: Comm, memory: Tensor | None = None
) -> Tensor:
    """Run a layer on x [B, T, hidden], which is overwritten; memory: the layer's part of the cache."""
    first: Norm | None = layer.input_norm
    second = layer.post_norm
    if stack.is_parallel:
        normed = x
        if not second:  # both work on the same numbers; of one row a product norms what it multiplies for nothing
            assert first
            normed, first, second = (x, first, first) if x.shape[:2] == (1, 1) else (first(x), None, None)
        attended = _attend(stack, layer, normed, first, call, memory)
        inner = _mlp(stack, layer, normed, second, call.tasks)
        return comm.all_reduce_add(comm.all_reduce_add(x, layer.attention_out, attended), layer.mlp_out, inner)
    before, behind = ((first, second), (None, None)) if stack.is_pre_norm else ((None, None), (first, second))
    x = comm.all_reduce_add(x, layer.attention_out, _attend(stack, layer, x, before[0], call, memory))
    x = behind[0](x) if behind[0] else x
    if layer.cross:
        x = comm.all_reduce_add(x, layer.cross.out, _attend_source(stack, layer.cross, x, call, memory))
    x = comm.all_reduce_add(x, layer.mlp_out, _mlp(stack, layer, x, before[1], call.tasks))
    return behind[1](x) if behind[1] else x


def _attend(
    stack: Stack,
    layer: LayerWeights,
    x: Tensor,
    norm: Norm | None,
    call: Call,
    memory: Tensor | None,
) -> Tensor:
    """Give what the heads of this process attend to, [B, T, H * D]."""
    q, k, v = split(stack, layer.qkv.fused(x, norm), 3)  # [B, H, T, D] each
    k, v = adapted(k, layer.ia3, 0, call.tasks), adapted(v, layer.ia3, 1, call.tasks)
    return _joined(call.attend(q, k, v, memory))


def _attend_source(stack: Stack, cross: CrossWeights, x: Tensor, call: Call, memory: Tensor | None) -> Tensor:
    assert call.attend_source and memory is not None
    (q,) = split(stack, cross.query.fused(x, cross.norm), 1)
    return _joined(call.attend_source(q, memory))


def split(stack: Stack, x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """[B, T, parts * H * D] -> [B, H, T, D] each."""
    return x.view(*x.shape[:2], parts, -1, stack.size_per_head).permute(2, 0, 3, 1, 4).unbind()


def _mlp(stack: Stack, layer: LayerWeights, x: Tensor, norm: Norm | None, tasks: Tensor | None) -> Tensor:
    """Give the inner layer of norm(x): [B, T, hidden] -> this process's part of [B, T, inter]."""
    if layer.mlp_gate and norm:
        x, norm = norm(x), None
    inner = layer.mlp_in.fused(x, norm, stack.activation)
    if layer.mlp_gate:
        inner *= layer.mlp_gate(x)
    if layer.ia3 and tasks is not None:
        inner *= layer.ia3[2][tasks]
    return inner


def adapted(x: Tensor, ia3: tuple[Tensor, ...] | None, index: int, tasks: Tensor | None) -> Tensor:
    """Scale keys or values, [B, H, T, D], by their tokens' tasks, [B, T]."""
    if ia3 is None or tasks is None:
        return x
    return x * ia3[index][tasks].view(*tasks.shape, -1, x.shape[-1]).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H * D]."""
    return x.transpose(1, 2).flatten(2)
