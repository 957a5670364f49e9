"""What megatron-core's configuration says of layers with the gated delta rule, and of attention beside them.

Semantics: megatron-core 0.20, ``gpt/experimental_attention_variant_module_specs.py`` (which layers have it) and
``ssm/gated_delta_net``: its output's gate has the feed-forward's function, and its norm the other norms' epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.weights.values import bounded
from ft_format.layout import LARGEST
from models.blocks.mixture import DENSE_LAYER
from models.checks import shown

_FILE = "model_config.yaml"
_VARIANT, _FREQUENCY, _GATE = "experimental_attention_variant", "linear_attention_freq", "attention_output_gate"
OF_DELTA = (_VARIANT, _FREQUENCY, _GATE)
"""Keys that are honoured with the gated delta rule alone."""
_NAMES = ("gated_delta_net", "gdn")
_SIZES = {
    "key_head_num": ("linear_num_key_heads", 16),
    "value_head_num": ("linear_num_value_heads", 32),
    "key_size": ("linear_key_head_dim", 128),
    "value_size": ("linear_value_head_dim", 128),
    "conv_size": ("linear_conv_kernel_dim", 4),
}
"""Fields of the block by megatron-core's, and what those are where they are not said."""
_FUNCTIONS = ("silu", "gated silu", "swiglu", "fast-swiglu")


def is_delta(config: Mapping[str, Any]) -> bool:
    """Whether some layers have the gated delta rule."""
    return config.get(_VARIANT) in _NAMES


def delta_problems(config: Mapping[str, Any]) -> list[str]:
    """List what such a model has that no block here has, one line each; nothing where it is none."""
    if not is_delta(config):
        return []
    found, said, layers = [], config.get(_FREQUENCY), config.get("num_layers")
    is_period = isinstance(said, int) and not isinstance(said, bool) and said > 0
    is_list = isinstance(said, (list, tuple)) and len(said) == layers and all(each in (0, 1) for each in said)
    if not (is_period or is_list):
        found.append(f"{_FREQUENCY}: {shown(said)}  (a number, or 0 or 1 for each of {shown(layers)} layers)")
    if config.get("activation") not in _FUNCTIONS:
        found.append(f"activation: {shown(config.get('activation'))}  (the gate of {_VARIANT} is SiLU's)")
    for key in ("multi_latent_attention", "mtp_num_layers"):
        if config.get(key):
            found.append(f"{key}: {shown(config[key])}  (beside {_VARIANT})")
    sizes = delta_sizes(config)
    if sizes["value_head_num"] % sizes["key_head_num"]:
        keys, values = (_SIZES[name][0] for name in ("key_head_num", "value_head_num"))
        found.append(f"{values}: {sizes['value_head_num']}  (no multiple of {keys} {sizes['key_head_num']})")
    return found


def delta_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of the description that such a model has beside others; nothing where it is none.

    Args:
        config: of the model, in megatron-core's words.
        fields: the others.

    Raises:
        CheckpointError: a key is not what it must be.
    """
    if not is_delta(config):
        return {}
    said, layers = config[_FREQUENCY], fields["num_layer"]
    linear = said if isinstance(said, (list, tuple)) else [(layer + 1) % said for layer in range(layers)]
    blocks = fields.get("layers.blocks") or (DENSE_LAYER,) * layers
    return {
        "attention.has_output_gate": bool(config.get(_GATE)),
        "layers.blocks": tuple(
            ("delta", own[1]) if is_linear else own for own, is_linear in zip(blocks, linear, strict=True)
        ),
        **{f"delta.{name}": size for name, size in delta_sizes(config).items()},
    }


def delta_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of the gated delta rule."""
    given = {name: (key, config.get(key), default) for name, (key, default) in _SIZES.items()}
    return {
        name: bounded(default if value is None else value, f"{_FILE}: {key}", LARGEST)
        for name, (key, value, default) in given.items()
    }
