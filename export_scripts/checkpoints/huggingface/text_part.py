"""The text model of a checkpoint that sees images as well: it becomes transformers' class of text alone.

Names: models/text_names.py. Defaults: transformers, ``models/{gemma3,llama4,qwen2_vl,qwen2_5_vl,qwen3_vl,qwen3_5}`` and
``conversion_mapping.py``, of versions 4 and 5. Where a position of mrope has three numbers, those of a text are equal:
it is rotated as by plain positions, and the images' features, Qwen3's in deeper layers too, are added to images' tokens
alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import models
from export_scripts.checkpoints.huggingface.files import Weights
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.schema import Computed, LazyTensor
from export_scripts.weights.settings import Settings
from handover.errors import CheckpointError
from models.blocks.rotary import ROPE_KEYS
from models.checks import shown
from models.quantization import TEXT
from models.text_names import text_name

_TIE = "tie_word_embeddings"
_OF_IMAGES = re.compile(r"(?:model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\.")
_MROPE = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class TextPart:
    """What the text of one class is.

    Attributes:
        model_type: of the class of text alone.
        defaults: of the text's configuration, where they are not those of that class.
        is_tied: what a configuration that says nothing of the head means.
        fixed: keys of the class of text alone whose value the whole has, whatever its configuration says.
        has_arrays: experts are arrays, turned around; the class of text alone has each expert by itself.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_tied: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    has_arrays: bool = False


_QWEN2 = TextPart("qwen2", {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6, "max_window_layers": 80})
_QWEN3_MOE = {"rope_theta": 5e5, "max_position_embeddings": 128_000, "num_key_value_heads": 16, "num_experts": 60}
_QWEN3_MOE |= {"num_experts_per_tok": 4, "moe_intermediate_size": 1408}
_GEMMA3 = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
PARTS: Mapping[str, TextPart] = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": TextPart("qwen3", {"rope_theta": 5e5, "max_position_embeddings": 128_000}),
    "qwen3_vl_moe": TextPart("qwen3_moe", _QWEN3_MOE, fixed={"norm_topk_prob": True}, has_arrays=True),
    **{name: TextPart(f"{name}_text") for name in ("qwen3_5", "qwen3_5_moe")},
    "llama4": TextPart("llama4_text"),
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
    whole = {key: value for key, value in settings.items() if key not in (TEXT, "vision_config", "auto_map")}
    text = settings.get(TEXT) or {}
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: {TEXT} is {shown(text)}, not a mapping")
    found = {**part.defaults, **whole, **text, **part.fixed, "model_type": part.model_type}
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


@dataclass(frozen=True)
class _Turned(Computed):
    """A tensor whose last two axes change places."""

    stored: LazyTensor

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, columns = self.stored.shape
        return (*lead, columns, rows)

    @property
    def data_type(self) -> str:
        return self.stored.data_type

    @property
    def sources(self) -> tuple[LazyTensor, ...]:
        return (self.stored,)

    def parts(self) -> tuple[Array, ...]:
        (whole,) = self.stored.parts()
        return (whole.swapaxes(-1, -2),)


def _as_rows(key: str, tensor: LazyTensor, settings: Settings) -> LazyTensor:
    """Show an array of experts as [experts, out, in]; files have [experts, in, out], which its shape must tell."""
    hidden, middle = settings.size("hidden_size"), settings.size("moe_intermediate_size")
    shapes = {"gate_up_proj": (2 * middle, hidden), "down_proj": (hidden, middle)}
    wanted = next((shape for end, shape in shapes.items() if key.endswith(f".experts.{end}")), None)
    if wanted is None or tensor.shape[1:] not in (wanted, wanted[::-1]):
        return tensor
    if wanted[0] == wanted[1]:
        raise CheckpointError(
            f"{key} is {list(tensor.shape)}: whether an expert's rows are outputs or inputs cannot be told",
            "convert a directory whose experts are tensors of their own",
        )
    return tensor if tensor.shape[1:] == wanted else _Turned(tensor)


def text_weights(weights: Weights, name: str, settings: Settings) -> Weights:
    """Call the text's tensors as the class of text alone does, and leave out those of images; say which.

    Args:
        weights: of the files.
        name: ``model_type`` of the whole.
        settings: of the text.

    Raises:
        CheckpointError: a tensor is there under two names, or how experts lie in it cannot be told.
    """
    found, left_out = dict[str, LazyTensor](), dict[str, int]()
    for key, tensor in weights.tensors.items():
        if image := _OF_IMAGES.match(key):
            left_out[image.group(1)] = left_out.get(image.group(1), 0) + 1
            continue
        renamed = text_name(key)
        if renamed in found:
            raise CheckpointError(f"one tensor is there under two names, one of them {key}", "keep one of them")
        found[renamed] = _as_rows(key, tensor, settings) if PARTS[name].has_arrays else tensor
    counts = ", ".join(f"{count} of {part}" for part, count in left_out.items()) or "none is there"
    said = (
        f"of {name} the text model alone is converted, as {PARTS[name].model_type}, which computes the same of texts "
        f"without images; tensors left out: {counts}"
    )
    return replace(weights, tensors=found, remarks=(*weights.remarks, said))
