"""The text model of a checkpoint that sees images as well: it becomes transformers' class of text alone.

Names and defaults: transformers, ``models/{gemma3,qwen2_vl,qwen2_5_vl,qwen3_vl}`` and ``conversion_mapping.py``, of
versions 4 and 5. Where a position of mrope has three numbers, those of a text are equal: it is rotated as by plain
positions, and the images' features, Qwen3's in deeper layers too, are added to images' tokens alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import models
from export_scripts.checkpoints.huggingface.files import Weights
from export_scripts.weights.architecture import Settings
from handover.errors import CheckpointError
from models.blocks.rotary import ROPE_KEYS
from models.checks import shown

_TEXT, _TIE = "text_config", "tie_word_embeddings"
_OF_IMAGES = re.compile(r"(?:model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\.")
_RENAMED = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.lm_", "lm_"))
_MROPE = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class TextPart:
    """What the text of one class is.

    Attributes:
        model_type: of the class of text alone.
        defaults: of the text's configuration, where they are not those of that class.
        is_tied: what a configuration that says nothing of the head means.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_tied: bool = False


_QWEN2 = TextPart("qwen2", {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6, "max_window_layers": 80})
_GEMMA3 = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
PARTS: Mapping[str, TextPart] = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": TextPart("qwen3", {"rope_theta": 5e5, "max_position_embeddings": 128_000}),
    "gemma3": TextPart("gemma3_text", {**_GEMMA3, "num_attention_heads": 8}, is_tied=True),
}
"""By the ``model_type`` of the whole."""


def text_settings(settings: Settings) -> Settings:
    """Take the text's configuration out of that of a model which sees images; any other is returned as it is.

    Raises:
        CheckpointError: it is no mapping.
    """
    name = settings.get("model_type")
    part = PARTS.get(name) if isinstance(name, str) else None
    if part is None:
        return settings
    whole = {key: value for key, value in settings.items() if key not in (_TEXT, "vision_config", "auto_map")}
    text = settings.get(_TEXT) or {}
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: {_TEXT} is {shown(text)}, not a mapping")
    found = {**part.defaults, **whole, **text, "model_type": part.model_type}
    found[_TIE] = bool(whole.get(_TIE, part.is_tied) or text.get(_TIE))
    found["architectures"] = [models.find(part.model_type).class_name]
    for key in ROPE_KEYS:
        if isinstance(found.get(key), Mapping):
            found[key] = _plain(found[key])
    return Settings(found)


def _plain(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what rotates a text; None: what is said beside the mapping does."""
    kept = {key: value for key, value in rope.items() if key not in _MROPE}
    if rope.get("rope_type", rope.get("type")) != "mrope":
        return kept
    others = {key: value for key, value in kept.items() if key not in ("rope_type", "type")}
    return {"rope_type": "default", **others} if others else None


def text_weights(weights: Weights, name: str) -> Weights:
    """Call the text's tensors as the class of text alone does, and leave out those of images; say which.

    Args:
        weights: of the files.
        name: ``model_type`` of the whole.

    Raises:
        CheckpointError: a tensor is there under two names.
    """
    found, left_out = {}, dict[str, int]()
    for key, tensor in weights.tensors.items():
        if image := _OF_IMAGES.match(key):
            left_out[image.group(1)] = left_out.get(image.group(1), 0) + 1
            continue
        renamed = next((new + key.removeprefix(old) for old, new in _RENAMED if key.startswith(old)), key)
        if renamed in found:
            raise CheckpointError(f"one tensor is there under two names, one of them {key}", "keep one of them")
        found[renamed] = tensor
    counts = ", ".join(f"{count} of {part}" for part, count in left_out.items()) or "none is there"
    said = (
        f"of {name} the text model alone is converted, as {PARTS[name].model_type}, which computes the same of texts "
        f"without images; tensors left out: {counts}"
    )
    return replace(weights, tensors=found, remarks=(*weights.remarks, said))
