"""How the layers of a network attend: what may differ between them, and the queries that grow with their positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.latent_attention import LatentAttend
from ..ops.positions import Alibi, Attend, AttentionSpec, Relative, Rotary, plain_frequencies
from .config import ModelConfig, Rope, Stack
from .layouts import StackWeights

PreparedAttention = Attend | LatentAttend


def attention_spec(
    stack: Stack, weights: StackWeights | None, device: torch.device, is_both_ways: bool
) -> AttentionSpec:
    """Return how a stack's first layer attends; ``is_both_ways``: also to tokens behind it, as an encoder does."""
    bias: Alibi | Relative | None = None
    if weights and weights.position_bias is not None:
        table = weights.position_bias
        bias = Alibi(table) if stack.positions == "alibi" else Relative(table, is_both_ways)
    rotary = _rotary(stack, stack.rope_of(0), device)
    return AttentionSpec(stack.attention_scale, bias, rotary, stack.attn_softcap)


def specs_of_layers(
    config: ModelConfig, weights: StackWeights | None, device: torch.device
) -> tuple[list[int], dict[int, AttentionSpec]]:
    """Return which way of attending each layer has, and how layers of each way attend."""
    common = attention_spec(config, weights, device, is_both_ways=False)
    kinds = _kinds_of_layers(config, weights) if weights else []
    differing = list(dict.fromkeys(kinds))
    specs = {number: kind.spec(common, _rotary(config, kind.rope, device)) for number, kind in enumerate(differing)}
    return [differing.index(kind) for kind in kinds], specs


def tempered(
    attend: PreparedAttention, temperature: tuple[float, float], spec: AttentionSpec, positions: Tensor
) -> PreparedAttention:
    """Make queries that are not rotated grow with their positions, where the model's do.

    Args:
        attend: attends by queries as they are.
        temperature: factor and floor of the growth (ModelConfig.temperature); a factor of 0: they do not grow.
        spec: how the layers attend.
        positions: [B or 1, T].
    """
    factor, floor = temperature
    if not factor or spec.rotary:
        return attend
    factors = 1 + factor * torch.log1p(torch.floor((positions.float() + 1) / floor))[:, None, :, None]

    def attend_tempered(q: Tensor, *given: Any, **named: Any) -> Tensor:
        return attend((q * factors).to(q.dtype), *given, **named)

    return attend_tempered


class _Kind(NamedTuple):
    """What may differ from layer to layer; see AttentionSpec."""

    window: int
    chunk: int
    rope: Rope | None
    is_latent: bool

    def spec(self, common: AttentionSpec, rotary: Rotary | None) -> AttentionSpec:
        """Return how such a layer attends."""
        return common._replace(rotary=rotary, window=self.window, chunk=self.chunk, is_latent=self.is_latent)


def _kinds_of_layers(config: ModelConfig, decoder: StackWeights) -> list[_Kind]:
    chunks = config.chunks or (0,) * config.num_layer
    return [
        _Kind(config.window_of(index), chunks[index], config.rope_of(index), entry.parts == 1)
        for index, entry in zip(decoder.indices, decoder.entries, strict=True)
    ]


def _rotary(stack: Stack, rope: Rope | None, device: torch.device) -> Rotary | None:
    if not (width := 2 * len(rope.frequencies) if rope else stack.rotary_dim):
        return None
    if rope:
        frequencies = torch.tensor(rope.frequencies, dtype=torch.float32, device=device)
    else:
        frequencies = plain_frequencies(stack.rotary_dim, device=device)
    return Rotary(width, stack.rotates_pairs, frequencies, rope.factor if rope else 1.0)
