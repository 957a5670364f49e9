"""What the fields of Gemma 3's classes mean, in the words that the other decoders have.

NeMo 2.3 and 2.4, ``gpt/model/gemma3.py``; Megatron-Bridge, ``models/gemma/gemma3_provider.py``. Norms of queries and
keys are in NeMo's specification of the layers, whatever ``qk_layernorm`` says; in Megatron-Bridge it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.nemo.rotations import OF_LOCAL_LAYERS
from export_scripts.checkpoints.nemo.windows import AS_SAID
from export_scripts.weights.values import number, positive
from handover.errors import CheckpointError
from models.blocks.windows import FULL, SLIDING
from models.checks import quoted

_PATTERN, _BASES, _SCALE = "interleaved_attn_pattern", "rotary_base", "softmax_scale"


def is_gemma3(config: Mapping[str, Any]) -> bool:
    """Whether the fields are those of Gemma 3's classes."""
    return bool(config.get(_PATTERN)) and isinstance(config.get(_BASES), (list, tuple))


def gemma3_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """Put them into the words of ``model_config.yaml``; the window is NeMo's, see ``windows``.

    Raises:
        CheckpointError: a value that these classes do not compute with.
    """
    bases = config[_BASES]
    if len(bases) != 2:
        raise CheckpointError(f"{_BASES} is {quoted(bases)}, not one of layers with a window and one of the others")
    if config.get("seq_len_interpolation_factor") not in (None, 1):
        raise CheckpointError("seq_len_interpolation_factor is set, and layers with a window are not scaled")
    words = {
        _BASES: bases[1],
        OF_LOCAL_LAYERS: bases[0],
        "seq_len_interpolation_factor": config.get("rope_scaling_factor"),
        "scale_factor": None,
        "qk_layernorm": True,
        "window_size": [positive(config.get("window_size"), "window_size"), 0],
        "window_attn_skip_freq": _is_local(config),
        AS_SAID: True,
        _PATTERN: None,
        _SCALE: None,
    }
    if config.get(_SCALE):
        scalar = number(config[_SCALE], _SCALE) ** -2
        words["query_pre_attn_scalar"] = round(scalar) if abs(scalar - round(scalar)) < 1e-9 else scalar
    return words


def _is_local(config: Mapping[str, Any]) -> list[int]:
    """Return which layers have the window: a number of them and one without, or those that are listed so."""
    layers, pattern = positive(config.get("num_layers"), "num_layers"), config[_PATTERN]
    is_list = isinstance(pattern, (list, tuple))
    if is_list and len(pattern) == layers and set(pattern) <= {SLIDING, FULL}:
        return [int(kind == SLIDING) for kind in pattern]
    if is_list and len(pattern) == 2 and pattern[1] == 1 and isinstance(pattern[0], int) and pattern[0] >= 0:
        return [int((layer + 1) % (pattern[0] + 1) != 0) for layer in range(layers)]
    raise CheckpointError(f"{_PATTERN} is {quoted(pattern)}, not [layers with a window, 1] or a kind for each layer")
