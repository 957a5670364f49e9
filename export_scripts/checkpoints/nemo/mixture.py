"""What megatron-core's configuration says of a mixture of experts, as the fields of the block in models/.

Semantics: megatron-core 0.20, ``moe/moe_utils.py`` (``topk_routing_with_score_function``, ``group_limited_topk``) and
``moe/router.py``: a softmax over the chosen is one over all experts that is normalised, a sigmoid is normalised where
a token has several experts, and a group counts as its best ``topk // group_topk`` experts together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE, size_of
from export_scripts.checkpoints.nemo.core_fields import CAPACITY, ROUTER_LIMITS, capacity_problem
from export_scripts.checkpoints.nemo.limits import problems
from export_scripts.weights.values import bounded, number
from ft_format.layout import LARGEST
from models.blocks.mixture import DENSE_LAYER, SIGMOID, SOFTMAX, SPARSE_LAYER
from models.checks import shown
from models.config_json import MOST_EXPERTS

_GROUPS, _OF_GROUPS, _FREQUENCY = "moe_router_num_groups", "moe_router_group_topk", "moe_layer_freq"
_LATENT = "moe_latent_size"
_SCORING, _FIRST, _WIDTH = "moe_router_score_function", "moe_router_pre_softmax", "moe_ffn_hidden_size"

PREDICTORS, _REPEATED = "mtp_num_layers", "mtp_use_repeated_layer"
_OF_ERNIE = (
    "beside rotary_interleaved it is Megatron-Bridge's Ernie 4.5, and transformers' has a softmax, as the model was "
    "published; with softmax there it is converted as one that has it"
)


def experts_of(config: Mapping[str, Any]) -> int:
    """Count the experts of a layer; 0: it has one feed-forward."""
    count = config.get("num_moe_experts")
    return bounded(count, f"{CONFIG_FILE}: num_moe_experts", MOST_EXPERTS) if count not in (None, 0, 1) else 0


def chosen_of(config: Mapping[str, Any]) -> int:
    """Count the experts that a token uses."""
    return size_of(config, "moe_router_topk", 2)


def mixture_problems(config: Mapping[str, Any], where: str = "") -> list[str]:
    """List what a mixture has that no block here has, one line each."""
    found, chosen = problems(config, ROUTER_LIMITS, where), chosen_of(config)
    groups, of_groups = config.get(_GROUPS) or 1, config.get(_OF_GROUPS) or 1
    if groups != 1 and (not isinstance(of_groups, int) or chosen // of_groups not in (1, 2)):
        found.append(f"{where}{_OF_GROUPS}: {shown(of_groups)}  (a group counts as its best expert or its best two)")
    is_ernies = config.get("rotary_interleaved") and not config.get("moe_apply_probs_on_input")
    if is_ernies and config.get(_SCORING) == SIGMOID:
        found.append(f"{where}{_SCORING}: {SIGMOID}  ({_OF_ERNIE})")
    return found


def is_leaving_out(config: Mapping[str, Any]) -> str:
    """Return why a mixture's capacity is in the way; empty: no token can be left out."""
    return capacity_problem(config.get(CAPACITY), experts_of(config), chosen_of(config))


def mixture_fields(config: Mapping[str, Any], layers: int, is_gated: bool, has_bias: bool) -> dict[str, Any]:
    """Read the fields of the description; nothing where the model has no experts.

    Args:
        config: of the model, in megatron-core's words.
        layers: of the model.
        is_gated: whether a feed-forward has a gate.
        has_bias: whether linear layers have biases.

    Raises:
        CheckpointError: a key is not what it must be.
    """
    if not (experts := experts_of(config)):
        return {}
    scoring, chosen = str(config.get(_SCORING) or SOFTMAX), chosen_of(config)
    groups = size_of(config, _GROUPS, 1)
    chosen_groups = size_of(config, _OF_GROUPS, 1)
    shared, latent = (config.get(key) or 0 for key in ("moe_shared_expert_intermediate_size", _LATENT))
    return {
        "mixture.expert_num": experts,
        "mixture.experts_per_token": chosen,
        "mixture.inter_size": size_of(config, _WIDTH, config.get("ffn_hidden_size")),
        "mixture.is_gated": is_gated,
        "mixture.has_bias": has_bias,
        "mixture.has_router_bias": has_bias,
        "mixture.scoring": scoring,
        "mixture.is_normalised": chosen > 1 if scoring == SIGMOID else not config.get(_FIRST),
        "mixture.scale": number(config.get("moe_router_topk_scaling_factor") or 1, f"{CONFIG_FILE}: scaling factor"),
        "mixture.has_choice_bias": bool(config.get("moe_router_enable_expert_bias")),
        "mixture.group_num": groups,
        "mixture.groups_per_token": chosen_groups,
        "mixture.is_group_of_two": groups == 1 or chosen // chosen_groups == 2,
        "mixture.shared_inter_size": bounded(shared, f"{CONFIG_FILE}: shared experts", LARGEST) if shared else 0,
        "mixture.has_shared_gate": bool(shared and config.get("moe_shared_expert_gate")),
        "predictor_num": _predictors(config),
        "mixture.latent_size": bounded(latent, f"{CONFIG_FILE}: {_LATENT}", LARGEST) if latent else 0,
        "layers.blocks": tuple(SPARSE_LAYER if each else DENSE_LAYER for each in _sparse(config, layers)),
    }


def _predictors(config: Mapping[str, Any]) -> int:
    """Count the predictors of further tokens; one that is used again and again is there once."""
    if not config.get(PREDICTORS):
        return 0
    return 1 if config.get(_REPEATED) else size_of(config, PREDICTORS, None)


def _sparse(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Return which layers have experts: every n-th from the first on, or as they are listed."""
    said = config.get(_FREQUENCY) or 1
    if isinstance(said, (list, tuple)):
        return [bool(each) for each in said]
    step = bounded(said, f"{CONFIG_FILE}: {_FREQUENCY}", LARGEST)
    return [layer % step == 0 for layer in range(layers)]
