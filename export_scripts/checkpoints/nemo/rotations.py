"""How the layers of a NeMo, Megatron-Bridge or Megatron-LM model rotate queries and keys.

megatron-core: ``rotary_pos_embedding.py``, ``yarn_rotary_pos_embedding.py``, ``no_rope_freq`` of ``TransformerConfig``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE
from export_scripts.checkpoints.nemo.gpt_config import YARN
from export_scripts.weights.values import bounded, number
from ft_format.layout import LARGEST
from handover.errors import CheckpointError
from models.blocks.rope_scaling import Linear, Llama3, Scaling, Yarn
from models.blocks.rotary import Rotary
from models.checks import quoted, shown

OF_LOCAL_LAYERS = "rotary_base_of_local_layers"
"""The readers' own word: layers with a window have a base of their own, and no scaling."""
_LLAMA31 = {"scale_factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}
"""NeMo's names of Llama 3.1's scaling and their defaults, which are megatron-core's constants as well."""


def rotation_problems(config: Mapping[str, Any]) -> list[str]:
    """List the keys that megatron-core does not read beside others, one line each."""
    is_yarn = config.get("position_embedding_type") == YARN
    others = f"Llama 3.1's scaling{' or yarn' if is_yarn else ''}"
    found = []
    if (is_yarn or is_llama31(config)) and config.get("seq_len_interpolation_factor") not in (None, 1):
        factor = shown(config["seq_len_interpolation_factor"])
        found.append(f"seq_len_interpolation_factor: {factor}  (beside {others})")
    if is_yarn and is_llama31(config):
        found.append("position_embedding_type: yarn  (beside Llama 3.1's scaling)")
    if is_yarn and config.get("rotary_percentage", 1.0) != 1:
        found.append(f"rotary_percentage: {shown(config['rotary_percentage'])}  (yarn rotates whole heads)")
    return found


def read_rotaries(config: Mapping[str, Any], size: int, windows: tuple[int, ...]) -> tuple[Rotary | None, ...]:
    """Read how each layer rotates; None: it does not; CheckpointError: a value that no rotation can have."""
    rotary = _rotary(config, size)
    local = config.get(OF_LOCAL_LAYERS)
    of_local = rotary if local is None else Rotary(rotary.width, number(local, f"{CONFIG_FILE}: rotary_base"))
    each = (of_local if window else rotary for window in windows)
    return tuple(None if skips else one for one, skips in zip(each, _unrotated(config, len(windows)), strict=True))


def _unrotated(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Return which layers do not rotate: the last of each period of a number, or those that a list has a 1 for."""
    said = config.get("no_rope_freq")
    if not said:
        return [False] * layers
    if isinstance(said, int) and not isinstance(said, bool) and layers % said == 0:
        return [(layer + 1) % said == 0 for layer in range(layers)]
    if isinstance(said, (list, tuple)) and len(said) == layers:
        return [bool(each) for each in said]
    raise CheckpointError(
        f"{CONFIG_FILE}: no_rope_freq is {quoted(said)}, not a divisor of {layers} layers or a list of them"
    )


def _rotary(config: Mapping[str, Any], size: int) -> Rotary:
    base = number(config.get("rotary_base") or 10000, f"{CONFIG_FILE}: rotary_base")
    factor = number(config.get("seq_len_interpolation_factor") or 1, f"{CONFIG_FILE}: seq_len_interpolation_factor")
    scaling: Scaling | None = Linear(factor) if factor != 1 else None
    if is_llama31(config):
        said = {key: number(config.get(key) or default, f"{CONFIG_FILE}: {key}") for key, default in _LLAMA31.items()}
        waves = said["low_freq_factor"], said["high_freq_factor"], int(said["old_context_len"])
        scaling = Llama3(said["scale_factor"], *waves)
    if config.get("position_embedding_type") == YARN:
        scaling = _yarn(config)
    rotary = Rotary(_width(config, size), base, scaling)
    if scaling and (problem := scaling.problem(rotary.width, base)):
        raise CheckpointError(f"{CONFIG_FILE}: {scaling.kind}: {problem}")
    return rotary


def _yarn(config: Mapping[str, Any]) -> Yarn:
    """Read megatron-core's fields of yarn, which has no defaults for them."""

    def said(name: str) -> float:
        return number(config.get(f"yarn_{name}"), f"{CONFIG_FILE}: yarn_{name}")

    original = config.get("yarn_original_max_position_embeddings")
    mscales = [config.get(f"yarn_{name}") for name in ("mscale", "mscale_all_dim")]
    yarn = Yarn(
        factor=said("rotary_scaling_factor"),
        original_max_position=bounded(original, f"{CONFIG_FILE}: yarn_original_max_position_embeddings", LARGEST),
        beta_fast=said("beta_fast"),
        beta_slow=said("beta_slow"),
        truncate=bool(config.get("yarn_correction_range_round_to_int")),
    )
    if None in mscales:
        return yarn
    with_both = replace(yarn, mscale=said("mscale"), mscale_all_dim=said("mscale_all_dim"))
    if all(mscales):
        return with_both
    factor = yarn.grown(with_both.mscale) / yarn.grown(with_both.mscale_all_dim)
    return yarn if factor == yarn.attention_factor(0) else replace(yarn, said_attention_factor=factor)


def is_llama31(config: Mapping[str, Any]) -> bool:
    """Whether the rotation is scaled as in Llama 3.1: NeMo 1 has a key that decides, NeMo 2 the factor alone."""
    for key in ("scale_positional_embedding", "use_rope_scaling"):
        if key in config:
            return bool(config[key])
    return config.get("scale_factor") not in (None, 0, 1)


def _width(config: Mapping[str, Any], size_per_head: int) -> int:
    """Count the elements of a head that are rotated."""
    width = int(size_per_head * number(config.get("rotary_percentage", 1.0), f"{CONFIG_FILE}: rotary_percentage"))
    if width < 2 or width % 2:
        raise CheckpointError(f"rotary_percentage rotates {width} of a head's {size_per_head} elements, not pairs")
    return width
