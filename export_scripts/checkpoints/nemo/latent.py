"""What megatron-core's configuration says of latent attention, as the fields of the block in models/.

Semantics: megatron-core 0.20, ``MLATransformerConfig``, ``multi_latent_attention.py`` and
``yarn_rotary_pos_embedding.py``. What is ``original_max_position_embeddings`` was ``max_position_embeddings`` before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE, size_of
from export_scripts.checkpoints.nemo.limits import Limit, is_on, is_one_of, problems
from export_scripts.weights.values import bounded, number
from ft_format.layout import LARGEST
from models.blocks.rope_scaling import Yarn
from models.blocks.rotary import Rotary
from models.checks import shown

_MSCALES = ("mscale", "mscale_all_dim")
_SWITCH, _KIND, _FACTOR, _ORIGINAL = (
    *("multi_latent_attention", "rope_type", "rotary_scaling_factor"),
    "original_max_position_embeddings",
)
_DEFAULTS: dict[str, Any] = {
    **{"q_lora_rank": 512, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128},
    **{_FACTOR: 40, _ORIGINAL: 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0},
}
_SIZES = {
    "kv_lora_rank": "latent.kv_rank",
    "qk_head_dim": "latent.plain_size",
    "qk_pos_emb_head_dim": "latent.rotated_size",
    "v_head_dim": "latent.value_size",
}
_LIMITS = {
    "qk_layernorm": Limit(is_on, "what queries and keys are made from is normalised"),
    _KIND: Limit(is_one_of(None, "rope", "yarn"), "it rotates plainly or by YaRN"),
    "rotary_percentage": Limit(is_one_of(None, 1), "all of the rotated part is rotated"),
    "mtp_use_repeated_layer": Limit(lambda value: not value, "each predictor has a layer of its own"),
}
_EPSILON = 1e-6
"""What transformers' classes compute the norms within latent attention with, whatever ``rms_norm_eps`` says."""


def is_latent(config: Mapping[str, Any]) -> bool:
    """Whether a model has latent attention."""
    return bool(config.get(_SWITCH))


def with_original_length(words: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Call the length before YaRN as megatron-core does today."""
    longest = config.get("max_position_embeddings")
    if not is_latent(config) or config.get(_ORIGINAL) is not None or longest is None:
        return dict(words)
    return {**words, _ORIGINAL: longest}


def latent_problems(config: Mapping[str, Any]) -> list[str]:
    """List what of latent attention no block here has, one line each."""
    found = problems({"qk_layernorm": False, **config}, _LIMITS)
    factor, each, all_dim = (number(_said(config, key), f"{CONFIG_FILE}: {key}") for key in (_FACTOR, *_MSCALES))
    if factor <= 1:
        return found
    if _is_plain(config) and all_dim:
        found.append(f"{_MSCALES[1]}: {all_dim:g}  (scores are multiplied by it beside YaRN alone)")
    if not _is_plain(config) and (each <= 0 or (not all_dim and each != 1)):
        found.append(f"{_MSCALES[0]}: {each:g}  (transformers reads it with mscale_all_dim alone, and above 0)")
    return found


def latent_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of the description; CheckpointError: a key is not what it must be."""
    if not is_latent(config):
        return {}
    sizes = {field: size_of(config, key, _DEFAULTS[key]) for key, field in _SIZES.items()}
    rank = config.get("q_lora_rank", _DEFAULTS["q_lora_rank"])
    layers, heads = fields["num_layer"], fields["attention.head_num"]
    rotary = _rotary(config, sizes["latent.rotated_size"])
    blocks = fields.get("layers.blocks") or (("", "feed_forward"),) * layers
    longest = fields["max_positions"]
    if isinstance(scaling := rotary.scaling, Yarn):
        longest = max(longest, int(scaling.factor * scaling.original_max_position))
    return {
        **sizes,
        "latent.query_rank": 0 if rank is None else bounded(rank, f"{CONFIG_FILE}: q_lora_rank", LARGEST),
        "attention.kv_head_num": heads,
        "attention.size_per_head": sizes["latent.plain_size"] + sizes["latent.rotated_size"],
        "attention.qk_norm": "",
        "layers.rotary": (rotary,) * layers,
        "layers.blocks": tuple(("latent", each[-1]) for each in blocks),
        "predictor_num": config.get("mtp_num_layers") or 0,
        "max_positions": longest,
    }


def latent_remarks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return where transformers computes norms with another epsilon than training did, in one line.

    vLLM and SGLang: ``deepseek_v2.py`` of both gives ``q_a_layernorm`` and ``kv_a_layernorm`` ``config.rms_norm_eps``.
    """
    epsilon = config.get("layernorm_epsilon", 1e-5)
    if not is_latent(config) or epsilon == _EPSILON:
        return ()
    return (
        f"layernorm_epsilon: {shown(epsilon)}  is that of all norms in training, in vLLM and in SGLang; transformers "
        f"computes the two within latent attention with {_EPSILON:g}",
    )


def _rotary(config: Mapping[str, Any], width: int) -> Rotary:
    base = number(config.get("rotary_base") or 10000, f"{CONFIG_FILE}: rotary_base")
    keys = (_FACTOR, "beta_fast", "beta_slow", *_MSCALES)
    said = {key: number(_said(config, key), f"{CONFIG_FILE}: {key}") for key in keys}
    if _is_plain(config) or said[_FACTOR] == 1:
        return Rotary(width, base)
    original = size_of(config, _ORIGINAL, _DEFAULTS[_ORIGINAL])
    factor, fast, slow, each, all_dim = said.values()
    return Rotary(width, base, Yarn(factor, original, fast, slow, mscale=each, mscale_all_dim=all_dim))


def _is_plain(config: Mapping[str, Any]) -> bool:
    return config.get(_KIND) == "rope"


def _said(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    return _DEFAULTS[key] if value is None else value
