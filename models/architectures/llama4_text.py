"""Llama 4's text model: chunks and rotation in most layers, experts that are chosen by a sigmoid in all or some.

Keys and defaults: transformers, ``configuration_llama4.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from models.architecture import Architecture
from models.architectures import llama
from models.architectures.smollm3 import RopeInSome, rotates
from models.blocks.attention import NO_NORM, UNIT, Biases
from models.blocks.mixture import SIGMOID, EveryLayer, Experts
from models.blocks.windows import CHUNKED, FULL
from models.config_json import CHECKS, ConfigJson
from models.keys import Fields, Keys

_CHUNK = 8192


class Chunks(Keys):
    """The chunk of each layer; where none are listed, those that rotate have it."""

    says: ClassVar[tuple[str, ...]] = ("layers.chunk",)
    _SIZE, _KINDS = "attention_chunk_size", "layer_types"

    def read(self, config: ConfigJson) -> dict[str, Any]:
        listed = config.layer_types()
        has_chunk = [kind == CHUNKED for kind in listed] if listed else rotates(config)
        size = config.size(self._SIZE, _CHUNK)
        return {self.says[0]: tuple(size if has else 0 for has in has_chunk)}

    def write(self, fields: Fields) -> dict[str, Any]:
        """Write the list, and a size even where no layer has it, beyond all texts: the class takes a number."""
        chunks = fields[self.says[0]]
        size = max(chunks) or max(_CHUNK, fields["max_positions"])
        return {self._SIZE: size, self._KINDS: [CHUNKED if each else FULL for each in chunks]}

    def problems(self, config: ConfigJson) -> list[str]:
        return [f"{self._SIZE}: none  (its class takes a number)"] if config.get(self._SIZE) is None else []

    def lacks(self, fields: Fields) -> list[str]:
        sizes = {*fields[self.says[0]]} - {0}
        return [f"{self.says[0]}: {sorted(sizes)}  (it has one size)"] if len(sizes) > 1 else []


class NormAndTemperature(Keys):
    """Whether queries and keys are normalised where they are rotated, and how queries grow where they are not."""

    says: ClassVar[tuple[str, ...]] = ("attention.qk_norm", "attention.temperature", "attention.temperature_floor")
    _NORM, _SWITCH, _SCALE, _FLOOR = "use_qk_norm", "attn_temperature_tuning", "attn_scale", "floor_scale"

    def read(self, config: ConfigJson) -> dict[str, Any]:
        scale = config.number(self._SCALE) if config.get(self._SWITCH) else 0.0
        floor = config.size(self._FLOOR) if scale else 0
        return dict(zip(self.says, (UNIT if config.get(self._NORM) else NO_NORM, scale, floor), strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        norm, scale, floor = (fields[name] for name in self.says)
        said = {self._SCALE: scale, self._FLOOR: floor} if scale else {}
        return {self._NORM: bool(norm), self._SWITCH: bool(scale), **said}

    def lacks(self, fields: Fields) -> list[str]:
        norm = fields[self.says[0]]
        return [f"{self.says[0]}: {norm}  (its norm has no weights)"] if norm not in (NO_NORM, UNIT) else []


class ListedExperts(EveryLayer):
    """Which layers have experts, by their numbers; without a list every n-th, from the n-th on."""

    _LIST, _STEP = "moe_layers", "interleave_moe_layer_step"

    def sparse(self, config: ConfigJson) -> Sequence[bool]:
        layers = range(config.layer_num)
        if config.get(self._LIST) is None:
            step = config.size(self._STEP)
            return [not (layer + 1) % step for layer in layers]
        listed = CHECKS.entries(config[self._LIST], f"config.json: {self._LIST}")
        return [layer in listed for layer in layers]

    def write(self, fields: Fields) -> dict[str, Any]:
        """Write the list, and beside it the step that engines of their own read."""
        blocks = fields[self.says[0]]
        sparse = [layer for layer, each in enumerate(blocks) if "mixture" in each]
        step = sparse[0] + 1 if sparse else 0
        said = {self._STEP: step} if sparse == [*range(step - 1, len(blocks), step or 1)] else {}
        return {self._LIST: sparse, **said}


class ExpertsAndShared(Experts):
    """A layer's experts, and one as wide that every token uses."""

    says: ClassVar[tuple[str, ...]] = (*Experts.says, "mixture.shared_inter_size")

    def read(self, config: ConfigJson) -> dict[str, Any]:
        count, used, width = config.experts(self.count), config.size(self.used), config.size(self.width)
        return dict(zip(self.says, (count, used, width, width), strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        keys = (self.count, self.used, self.width)
        return {key: fields[name] for key, name in zip(keys, self.says, strict=False)}

    def lacks(self, fields: Fields) -> list[str]:
        own, shared = (fields[name] for name in self.says[2:])
        return [f"{self.says[3]}: {shared}  (it is as wide as an expert, {own})"] if own != shared else []


LLAMA4_TEXT = Architecture(
    model_type="llama4_text",
    class_name="Llama4ForCausalLM",
    keys=llama.keys(
        middle="intermediate_size_mlp",
        rope=RopeInSome(),
        more=[
            Biases("attention_bias"),
            Chunks(),
            NormAndTemperature(),
            ListedExperts(),
            ExpertsAndShared(width="intermediate_size"),
        ],
    ),
    has={
        "attention.rotates_neighbours": True,
        "mixture.scoring": SIGMOID,
        "mixture.is_normalised": False,
        "mixture.is_weighted_before": True,
        "mixture.is_in_arrays": True,
        "mixture.is_in_halves": True,
    },
    names={
        "router": "feed_forward.router",
        **{role: f"feed_forward.{role}_proj" for role in ("gate", "up", "down")},
        **{f"shared.{role}": f"feed_forward.shared_expert.{role}_proj" for role in ("gate", "up", "down")},
        "experts_gate_up": "feed_forward.experts.gate_up_proj",
        "experts_down": "feed_forward.experts.down_proj",
    },
    defaults={
        **llama.DEFAULTS,
        **{"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
        **{"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128},
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
        **{"num_experts_per_tok": 1, "num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": True},
        **{"no_rope_layer_interval": 4, "attention_chunk_size": _CHUNK, "attn_temperature_tuning": True},
        **{"floor_scale": 8192, "attn_scale": 0.1},
    },
)
