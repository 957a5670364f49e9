"""What megatron-core's configuration says of layers with the gated delta rule, and of attention beside them.

Semantics: megatron-core 0.20, ``gpt/experimental_attention_variant_module_specs.py`` (which layers have it) and
``ssm/gated_delta_net``: its output's gate has the feed-forward's function, and its norm the other norms' epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from export_scripts.checkpoints.nemo.config_file import size_of
from models.blocks.mixture import DENSE_LAYER
from models.checks import shown

_VARIANT, _FREQUENCY, _GATE = "experimental_attention_variant", "linear_attention_freq", "attention_output_gate"
_LATENT, _PREDICTORS, _REPEATED = "multi_latent_attention", "mtp_num_layers", "mtp_use_repeated_layer"
OF_DELTA = (_VARIANT, _FREQUENCY, _GATE, _PREDICTORS)
"""Keys that are honoured with the gated delta rule, and most with it alone."""
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
    if config.get(_LATENT):
        found.append(f"{_LATENT}: {shown(config[_LATENT])}  (beside {_VARIANT})")
    if config.get(_PREDICTORS) and (is_period or is_list):
        found += _predictor_problems(config)
    sizes = delta_sizes(config)
    if sizes["value_head_num"] % sizes["key_head_num"]:
        keys, values = (_SIZES[name][0] for name in ("key_head_num", "value_head_num"))
        found.append(f"{values}: {sizes['value_head_num']}  (no multiple of {keys} {sizes['key_head_num']})")
    return found


def _predictor_problems(config: Mapping[str, Any]) -> list[str]:
    """List why predictors of further tokens are none of Qwen3-Next's files, one line each."""
    count, found = config[_PREDICTORS], []
    if count != 1 and not config.get(_REPEATED):
        found.append(f"{_PREDICTORS}: {shown(count)}  (there is one beside the layers)")
    if _linear(config[_FREQUENCY], config["num_layers"])[-1]:
        found.append(f"{_PREDICTORS}: {shown(count)}  (its layer is as the last, which has no attention)")
    return found


def _linear(said: int | Sequence[int], layers: int) -> list[bool]:
    """Return which layers have the gated delta rule."""
    if isinstance(said, int):
        return [bool((layer + 1) % said) for layer in range(layers)]
    return [bool(each) for each in said]


def delta_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of the description that such a model has beside others; nothing where it is none.

    Raises:
        CheckpointError: a key is not what it must be.
    """
    if not is_delta(config):
        return {}
    layers = fields["num_layer"]
    linear = _linear(config[_FREQUENCY], layers)
    blocks = fields.get("layers.blocks") or (DENSE_LAYER,) * layers
    return {
        "attention.has_output_gate": bool(config.get(_GATE)),
        "predictor_num": 1 if config.get(_PREDICTORS) else 0,
        "layers.blocks": tuple(
            ("delta", own[1]) if is_linear else own for own, is_linear in zip(blocks, linear, strict=True)
        ),
        **{f"delta.{name}": size for name, size in delta_sizes(config).items()},
    }


def delta_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of the gated delta rule."""
    return {name: size_of(config, key, default) for name, (key, default) in _SIZES.items()}
