"""What the engine computes of a decoder that models/ describes, wherever its tensors are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from models.blocks.attention import UNIT, WHOLE
from models.blocks.latent import NORM_EPS
from models.blocks.multipliers import Multipliers
from models.blocks.norms import RMS_NORM
from models.blocks.rotary import Rotary
from models.decoder import Decoder

from ...ops.latent_attention import LatentUp
from ...ops.linear import Norm
from ..blocks.attention import GroupedWeights, SelfAttention
from ..blocks.feed_forward import DenseWeights, FeedForward
from ..blocks.latent import LatentWeights
from ..config import ModelConfig, Rope
from ..hub_experts import ExpertsReader
from ..layouts import Entrance, LayerWeights, StackWeights
from ..reader import Reader
from .mixture import read_mixture
from .state_mixers import read_state_mixer


def structure(decoder: Decoder) -> dict[str, Any]:
    """List the fields of a ModelConfig that say which network it is; no name of an architecture is looked at."""
    attention, feed_forward, norms = decoder.attention, decoder.feed_forward, decoder.norms
    rotary = next((layer.rotary for layer in decoder.layers if layer.rotary), None)
    multipliers = decoder.multipliers or Multipliers()
    return {
        "vocab_size": decoder.vocab_size,
        "model_width": decoder.hidden_units,
        "num_layer": decoder.num_layer,
        "head_num": attention.head_num,
        "kv_head_num": attention.kv_head_num,
        "size_per_head": attention.size_per_head,
        "attention_scalar": attention.scalar,
        "attention_multiplier": decoder.latent.scale(rotary) if decoder.latent else attention.multiplier,
        "attn_softcap": attention.softcap,
        "inter_size": _used_width(decoder),
        "activation": feed_forward.activation,
        "is_gated": feed_forward.is_gated,
        "is_rms": norms.kind == RMS_NORM,
        "layernorm_eps": norms.eps,
        "has_zero_centred_norms": norms.is_zero_centred,
        "windows": tuple(layer.window for layer in decoder.layers),
        "chunks": tuple(layer.chunk for layer in decoder.layers),
        "temperature": (attention.temperature, attention.temperature_floor),
        "positions": "rotary",
        "norms_heads_together": attention.qk_norm == WHOLE,
        "rotates_pairs": decoder.latent.is_interleaved if decoder.latent else attention.rotates_neighbours,
        "has_output_gate": attention.has_output_gate,
        "ropes": tuple(_rope(layer.rotary, decoder.max_positions) for layer in decoder.layers),
        "embedding_scale": decoder.embedding_scale,
        "residual_multiplier": decoder.residual_multiplier,
        "logits_divisor": decoder.logits_divisor / multipliers.logits,
        "final_softcap": decoder.final_softcap,
        "mamba": decoder.mamba,
        "delta": decoder.delta,
        "multipliers": multipliers,
    }


def _used_width(decoder: Decoder) -> int:
    """Return the width of the middle of what a token uses in the last layer."""
    mixture = decoder.mixture
    if not mixture or "mixture" not in decoder.layers[-1].blocks:
        return decoder.inter_size
    return mixture.experts_per_token * mixture.inter_size + mixture.shared_inter_size


def _rope(rotary: Rotary | None, longest: int) -> Rope:
    return Rope(tuple(rotary.frequencies()), rotary.attention_factor(longest)) if rotary else Rope(())


def read_stack(
    final_norm: str, names_of: Callable[[int], Mapping[str, str]], read: Reader, config: ModelConfig, layers: range
) -> StackWeights:
    """Read a stack's weights.

    Args:
        final_norm: name of the last norm.
        names_of: a layer's tensors by role; several roles may have one name, that of a tensor which holds them all.
        read: reads tensors.
        config: of the model.
        layers: to read.
    """
    names = [names_of(index) for index in layers]
    return StackWeights(
        indices=layers,
        position_bias=None,
        final_norm=read.norm(final_norm, config),
        layers=tuple(_layer(read, config, own, index) for own, index in zip(names, layers, strict=True)),
        entrance=_entrance(read, config, names[0]) if names and "predictor.projection" in names[0] else None,
    )


def _entrance(read: Reader, config: ModelConfig, names: Mapping[str, str]) -> Entrance:
    norms = [_norm(read, config, names, f"predictor.{of}_norm") for of in ("embedding", "hidden")]
    embedding_norm, hidden_norm = norms
    assert embedding_norm and hidden_norm, "it has norms"
    return Entrance(embedding_norm, hidden_norm, read.column_parallel(names["predictor.projection"]))


def _layer(read: Reader, config: ModelConfig, names: Mapping[str, str], index: int) -> LayerWeights:
    norm = partial(_norm, read, config, names)
    return LayerWeights(
        input_norm=norm("input_norm"),
        attention=_attention(read, config, names, index),
        post_norm=norm("pre_mlp_norm"),
        feed_forward=_feed_forward(read, config, names),
        attention_output_norm=norm("post_attention_norm"),
        mlp_output_norm=norm("mlp_output_norm"),
        state_mixer=read_state_mixer(read, config, names),
    )


def _norm(read: Reader, config: ModelConfig, names: Mapping[str, str], role: str) -> Norm | None:
    return read.norm(names[role], config) if role in names else None


def _attention(read: Reader, config: ModelConfig, names: Mapping[str, str], index: int) -> SelfAttention | None:
    if "latent.output" in names:
        return _latent(read, config, names)
    return _grouped(read, config, names, index) if "query" in names else None


def _unit_norm(read: Reader, config: ModelConfig, index: int) -> Norm | None:
    """Return a norm of heads without weights: behind the rotation, which changes no length, it is what it is before."""
    rope = config.rope_of(index)
    if not (config.decoder and config.decoder.attention.qk_norm == UNIT and rope and rope.frequencies):
        return None
    return Norm(read.empty((config.size_per_head,)).fill_(1), None, config.layernorm_eps, is_rms=True)


def _grouped(read: Reader, config: ModelConfig, names: Mapping[str, str], index: int) -> GroupedWeights:
    unit = _unit_norm(read, config, index)
    return GroupedWeights(
        qkv=read.column_parallel(*dict.fromkeys((names["query"], names["key"], names["value"]))),
        out=read.row_parallel(names["attention_output"]),
        size_per_head=config.size_per_head,
        group=config.group,
        query_norm=unit or _norm(read, config, names, "query_norm"),
        key_norm=unit or _norm(read, config, names, "key_norm"),
        norms_together=config.norms_heads_together,
        sinks=read.tensor(names["sinks"], torch.float32) if "sinks" in names else None,
        is_gated=config.has_output_gate,
    )


def _latent(read: Reader, config: ModelConfig, names: Mapping[str, str]) -> LatentWeights:
    """Read latent attention: heads are split between ranks, and each makes the whole latent vector."""
    assert config.decoder and config.decoder.latent, "a Hugging Face directory describes it"
    latent, is_narrow = config.decoder.latent, "latent.query_down" in names
    query_norm, kv_norm = (_norm(read, config, names, f"latent.{role}_norm") for role in ("query", "kv"))
    assert kv_norm, "it has a norm"
    assert isinstance(read, ExpertsReader)
    matrix = read.tensor(f"{names['latent.kv_up']}.weight").view(-1, latent.kv_size, latent.kv_rank)
    up = LatentUp(replace(kv_norm, eps=NORM_EPS), matrix, latent.plain_size)
    return LatentWeights(
        down=read.column_parallel(names["latent.query_down" if is_narrow else "latent.query"], names["latent.kv_down"]),
        query_norm=replace(query_norm, eps=NORM_EPS) if query_norm else None,
        query_up=read.column_parallel(names["latent.query_up"]) if is_narrow else None,
        up=read.placed(up, names["latent.kv_up"], is_extendable=False),
        out=read.row_parallel(names["latent.output"]),
        rotated_size=latent.rotated_size,
    )


def _feed_forward(read: Reader, config: ModelConfig, names: Mapping[str, str]) -> FeedForward | None:
    if "router" in names:
        assert isinstance(read, ExpertsReader) and config.decoder and config.decoder.mixture
        return read_mixture(read, config.decoder.mixture, config.decoder.feed_forward, names)
    if "up" not in names:
        return None
    up = read.column_parallel(names["up"])
    gate = read.column_parallel(names["gate"]) if config.is_gated else None
    # What is called the gate is activated, and multiplies the other.
    out, factor = read.row_parallel(names["down"]), config.multipliers.gate
    return DenseWeights(gate or up, up if gate else None, out, config.activation, factor=factor)
