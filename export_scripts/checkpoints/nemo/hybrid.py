"""What megatron-core's configuration says of a hybrid: which block each layer is, and its Mamba 2.

Semantics: megatron-core 0.20, ``models/hybrid/hybrid_layer_allocation.py`` (the pattern: ``|`` between pipeline stages,
``/`` before layers that predict further tokens) and ``ssm/mamba_mixer.py``: linear layers without biases, dt without
bounds, a norm of the output whose epsilon is a constant. Attention has no positions unless they are rotated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE, size_of
from export_scripts.weights.values import bounded
from ft_format.layout import LARGEST
from models.architectures.nemotron_h import SYMBOLS
from models.blocks.mamba import CORE_EPS
from models.checks import shown

_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""The newer word first."""
_RATIOS = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
HYBRID_KEYS = ("is_hybrid_model", *_PATTERNS, *_RATIOS)
_STAGE, _FURTHER = "|", "/"
_PREDICTOR = "mtp_hybrid_override_pattern"
_NO_POSITIONS = "none"


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Whether layers are one block each, as a pattern says."""
    return any(config.get(key) for key in HYBRID_KEYS)


def pattern_of(config: Mapping[str, Any]) -> str:
    """Read which block each layer is, a letter each; empty: it is not said."""
    said = next((config[key] for key in _PATTERNS if config.get(key)), "")
    return str(said).partition(_FURTHER)[0].replace(_STAGE, "")


def hybrid_problems(config: Mapping[str, Any]) -> list[str]:
    """List what a hybrid has that no block here has, one line each; nothing where it is none."""
    if not is_hybrid(config):
        return []
    said = {key: str(config[key]) for key in _PATTERNS if config.get(key)}
    if not said:
        key = next(key for key in HYBRID_KEYS if config.get(key))
        return [f"{key}: {shown(config[key])}  ({_PATTERNS[0]} must say which block each layer is)"]
    key = next(iter(said))
    pattern, found = pattern_of(config), []
    if len({*said.values()}) > 1:
        found.append(f"{_PATTERNS[1]}: {shown(said[_PATTERNS[1]])}  (beside another {_PATTERNS[0]})")
    if strange := sorted({*pattern} - SYMBOLS.keys()):
        found.append(f"{key}: {', '.join(strange)}  (layers are {', '.join(SYMBOLS)})")
    if config.get("num_layers") not in (None, len(pattern)):
        found.append(f"num_layers: {shown(config['num_layers'])}  ({key} has {len(pattern)})")
    if "E" in pattern and not config.get("num_moe_experts"):
        found.append(f"num_moe_experts: {shown(config.get('num_moe_experts'))}  ({key} has layers of experts)")
    if config.get("position_embedding_type") not in (_NO_POSITIONS, "rope"):
        found.append(
            f"position_embedding_type: {shown(config.get('position_embedding_type'))}  (a hybrid has none, or rotation)"
        )
    return found


def hybrid_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of the description that a hybrid has beside others; nothing where it is none.

    Raises:
        CheckpointError: a key is not what it must be.
    """
    if not is_hybrid(config):
        return {}
    pattern = pattern_of(config)
    found = {"layers.blocks": tuple(SYMBOLS[each] for each in pattern), **_predictor_fields(config, pattern)}
    if config.get("position_embedding_type") == _NO_POSITIONS:
        found["layers.rotary"] = (None,) * len(pattern)
    sizes = mamba_sizes(config) if "M" in pattern else {}
    return found | {f"mamba.{name}": value for name, value in sizes.items()}


def _predictor_fields(config: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """Read the predictors of further tokens: a pattern each, or one that is repeated, in the pattern or beside it.

    Those that differ, and those with blocks that the model has not, are none that files have, and are left out.
    """
    whole = next((str(config[key]) for key in _PATTERNS if config.get(key)), "")
    said = [each for each in whole.split(_FURTHER)[1:] if each] or [str(config.get(_PREDICTOR) or "")]
    count = len(said) if _FURTHER in whole else config.get("mtp_num_layers") or 0
    if not count or len({*said}) > 1 or not said[0] or {*said[0]} - {*pattern}:
        return {"predictor_num": 0}
    physical = 1 if config.get("mtp_use_repeated_layer") else bounded(count, f"{CONFIG_FILE}: mtp_num_layers", LARGEST)
    return {"predictor_num": physical, "predictor_blocks": tuple(SYMBOLS[each] for each in said[0])}


def mamba_sizes(config: Mapping[str, Any], times: int = 2) -> dict[str, Any]:
    """Read the fields of Mamba 2; heads are as wide together as the model ``times`` where their number is not said."""
    size = size_of(config, "mamba_head_dim", 64)
    return {
        "head_num": size_of(config, "mamba_num_heads", times * size_of(config, "hidden_size") // size),
        "size_per_head": size,
        "group_num": size_of(config, "mamba_num_groups", 8),
        "state_size": size_of(config, "mamba_state_dim", 128),
        "chunk_size": size_of(config, "mamba_chunk_size", 128),
        "norm_eps": CORE_EPS,
    }
