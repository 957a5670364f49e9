"""What Megatron-Bridge's configuration says of Falcon-H1: Mamba 2 and attention side by side in every layer.

Semantics: Megatron-Bridge 0.6, ``models/falcon_h1`` (``falconh1_provider.py``; ``falconh1_layer.py``: Mamba's linear
layers have no biases, and attention's bias is added behind its multiplier, as in no class of transformers).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE
from export_scripts.checkpoints.nemo.hybrid import mamba_sizes
from export_scripts.checkpoints.nemo.limits import Limit, is_off, is_on, is_one_of, problems
from export_scripts.weights.values import above_zero, bounded
from ft_format.layout import LARGEST
from handover.errors import CheckpointError
from models.architectures.falcon_h1 import BLOCKS
from models.checks import shown

RATIO = "falconh1_ratio"
"""Which no other model's configuration has."""
_ALL = "every layer has all three blocks"
_LIMITS: dict[str, Limit] = {
    RATIO: Limit(is_one_of(1), _ALL),
    **{f"use_{name}": Limit(is_on, _ALL) for name in ("mamba", "attention", "mlp")},
    "D_has_hdim": Limit(is_off, "each head of Mamba has one number"),
    "add_bias_linear": Limit(is_off, "its linear layers have no biases"),
    "position_embedding_type": Limit(is_one_of("rope"), "positions are rotated"),
}
_NUMBERS = {
    **{"embedding_multiplier": "embedding_scale", "lm_head_multiplier": "multipliers.logits"},
    **{f"attention_{which}_multiplier": f"multipliers.attention_{which}" for which in ("in", "out")},
    **{f"ssm_{which}_multiplier": f"multipliers.mamba_{which}" for which in ("in", "out")},
    "key_multiplier": "multipliers.key",
}
_LISTS = {"ssm_multipliers": 5, "mlp_multipliers": 2}
MULTIPLIERS = (*_NUMBERS, *_LISTS)
"""Keys that other models refuse."""


def is_falcon_h1(config: Mapping[str, Any]) -> bool:
    """Whether the class is Falcon-H1's."""
    return config.get(RATIO) is not None


def falcon_h1_problems(config: Mapping[str, Any]) -> list[str]:
    """List what Falcon-H1 has not, one line each; nothing where it is another model."""
    return problems({"position_embedding_type": None, **config}, _LIMITS) if is_falcon_h1(config) else []


def falcon_h1_fields(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Read the fields of the description that Falcon-H1 has beside others; nothing where it is another model.

    Raises:
        CheckpointError: a key is not what it must be.
    """
    if not is_falcon_h1(config):
        return {}
    given = {"mamba_num_groups": 1, **config, "mamba_chunk_size": config.get("chunk_size")}
    times = bounded(config.get("expand", 2), f"{CONFIG_FILE}: expand", LARGEST)
    sizes = {
        **mamba_sizes(given, times),
        "conv_size": bounded(config.get("d_conv", 4), f"{CONFIG_FILE}: d_conv", LARGEST),
        "has_conv_bias": is_on(config.get("conv_bias")),
        "has_norm": is_on(config.get("rmsnorm")),
        "has_norm_before_gate": bool(config.get("norm_before_gate")),
    }
    sections, (gate, down) = (_numbers(config, key, count) for key, count in _LISTS.items())
    return {
        "layers.blocks": (BLOCKS,) * layers,
        **{f"mamba.{name}": value for name, value in sizes.items()},
        **{name: above_zero(config.get(key, 1.0), f"{CONFIG_FILE}: {key}") for key, name in _NUMBERS.items()},
        **{"multipliers.sections": sections, "multipliers.gate": gate, "multipliers.down": down},
    }


def _numbers(config: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    listed = config.get(key) or (1.0,) * count
    if not isinstance(listed, (list, tuple)) or len(listed) != count:
        raise CheckpointError(f"{CONFIG_FILE}: {key} is {shown(listed)}, not a list of {count} numbers")
    return tuple(above_zero(each, f"{CONFIG_FILE}: {key}") for each in listed)
