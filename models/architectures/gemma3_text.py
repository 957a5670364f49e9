"""Gemma 3's text model: Gemma 2 with norms of queries and keys, without caps of scores, and two bases of the rotation.

Five layers with a window follow one without, and those have another base. Keys and defaults: transformers,
``configuration_gemma3.py``; version 4's keys are written, which every version reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.architecture import Architecture
from models.architectures import gemma, gemma2, llama
from models.blocks.attention import BY_HEAD, Biases, Caps
from models.blocks.feed_forward import Function
from models.blocks.rope_scaling import Yarn
from models.blocks.rotary import DEFAULT, Rotary, read_rotary, rope_problems, rotated_part, written
from models.blocks.windows import FULL, SLIDING, Windows
from models.checks import shown
from models.config_json import ConfigJson
from models.keys import Fields

_BASES = {SLIDING: ("rope_local_base_freq", 10000.0), FULL: ("rope_theta", 1e6)}
_ROPES, _SCALING, _PERIOD = "rope_parameters", "rope_scaling", "sliding_window_pattern"


class RopeByWindow(Windows):
    """The window of each layer, and its rotation: layers with a window have a base of their own, without scaling."""

    says = ("layers.window", "layers.rotary")

    def read(self, config: ConfigJson) -> dict[str, Any]:
        windows, size = super().read(config)["layers.window"], config.head_size
        rotaries = {}
        for kind in _BASES:
            key = _SCALING if kind == FULL and config.get(_SCALING) else f"{_ROPES}: {kind}"
            rotaries[kind] = read_rotary(_rope(config, kind), config, size, key)
        return {"layers.window": windows, "layers.rotary": tuple(rotaries[SLIDING if w else FULL] for w in windows)}

    def write(self, fields: Fields) -> dict[str, Any]:
        rotaries = {_kind(window): rotary for window, rotary in _layers(fields)}
        of_full = rotaries.get(FULL)
        bases = {key: rotaries[kind].base if kind in rotaries else base for kind, (key, base) in _BASES.items()}
        return {**super().write(fields), **bases, _SCALING: written(of_full.scaling) if of_full else None}

    def problems(self, config: ConfigJson) -> list[str]:
        said = config.get(_ROPES)
        if said and not (isinstance(said, Mapping) and said.keys() <= _BASES.keys()):
            return [f"{_ROPES}: {shown(said)}  (one for layers with a window, and one for the others)"]
        found = rope_problems(_rope(config, FULL), _SCALING if config.get(_SCALING) else _ROPES)
        if not _rope(config, FULL).get("truncate", True):
            found.append("truncate: false  (the class reads none for each kind of layers)")
        if (kind := _rope(config, SLIDING)["rope_type"]) != DEFAULT:
            found.append(f"{_ROPES}: {SLIDING}: {shown(kind)}  (layers with a window are not scaled)")
        parts = [rotated_part(each) for each in (config, _rope(config, FULL), _rope(config, SLIDING))]
        found += [f"partial_rotary_factor: {part:g}  (whole heads are rotated)" for part in parts if part != 1][:1]
        return found

    def lacks(self, fields: Fields) -> list[str]:
        found, size = super().lacks(fields), fields["attention.size_per_head"]
        if None in fields["layers.rotary"]:
            return [*found, "layers.rotary: not in every layer  (all layers rotate)"]
        for kind in _BASES:
            rotaries = {rotary for window, rotary in _layers(fields) if _kind(window) == kind}
            if len(rotaries) > 1 or any(rotary.width != size for rotary in rotaries):
                found.append(f"layers.rotary: {len(rotaries)} kinds in {kind}  (whole heads, one base)")
            if any(isinstance(rotary.scaling, Yarn) and not rotary.scaling.truncate for rotary in rotaries):
                found.append("layers.rotary: yarn that is not truncated  (the class reads no such key)")
            if kind == SLIDING and any(rotary.scaling for rotary in rotaries):
                found.append("layers.rotary: scaled  (layers with a window are not)")
        return found

    def unlisted(self, config: ConfigJson) -> list[bool]:
        """Return which layers have a window: the last of each period has none."""
        period = config.size(_PERIOD)
        return [bool((layer + 1) % period) for layer in range(config.layer_num)]


def _rope(config: ConfigJson, kind: str) -> dict[str, Any]:
    """Complete what is said of the rotation of layers with a window, or of those without.

    Where nothing is said of them, ``rope_scaling`` needs ``rope_type``: version 5 passes over its older ``type`` then.
    """
    said = (config.get(_ROPES) or {}).get(kind) or {"rope_type": DEFAULT}
    scaling = config.get(_SCALING) if kind == FULL else None
    said = {**said, **(scaling if isinstance(scaling, Mapping) else {})}
    key, base = _BASES[kind]
    return {"rope_theta": config.get(key, base), "rope_type": said.get("type", DEFAULT), **said}


def _layers(fields: Fields) -> list[tuple[int, Rotary]]:
    return list(zip(fields["layers.window"], fields["layers.rotary"], strict=True))


def _kind(window: int) -> str:
    return SLIDING if window else FULL


GEMMA3_TEXT = Architecture(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    keys=llama.keys(
        function=Function("hidden_activation", also=("hidden_act",), exact="gelu_python"),
        rope=RopeByWindow(pattern="111110"),
        more=[Biases("attention_bias"), Caps(has_scores=False), gemma.RootScale()],
    ),
    has={"norms.is_zero_centred": True, "norms.is_after": True, "attention.qk_norm": BY_HEAD},
    names=gemma2.NAMES,
    defaults={
        **gemma.DEFAULTS,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
)
