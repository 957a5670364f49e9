"""Keys of config.ini that all families have, and the names of activations that the older ones share."""

from __future__ import annotations

from typing import Any

from ft_format.config_ini import ConfigIni
from ft_format.families.family import DATA_TYPE, EXACT_GELU, Family, read_tasks
from ft_format.layout import stored
from ft_format.values import COUNT, FLAG, INDEX, Values, one_of

from ..config import NO_POSITION_LIMIT, PromptType

# FasterTransformer's names (activation_types.h) in lower case: function of the inner layer, whether a second matrix
# gates it.
_GATED = {"geglu": "gelu", "reglu": "relu", "siglu": "silu"}
_ACTIVATIONS = {name: (name, False) for name in _GATED.values()}
_ACTIVATIONS |= {gated: (name, True) for plain, name in _GATED.items() for gated in (plain, f"gated-{name}")}
ACTIVATION = one_of(_ACTIVATIONS)
"""Kind of value: a function, and whether a second matrix gates it."""
PLAIN_GELU = _ACTIVATIONS["gelu"]
_PROMPT_TYPE = one_of({str(kind.value): kind for kind in PromptType})


def exact_form(activation: str, section: Values) -> str:
    """Return the exact GELU where the model was trained with it, which is a key of this engine's own."""
    return "exact_gelu" if activation == "gelu" and section.get(EXACT_GELU, FLAG, False) else activation


def common_keys(ini: ConfigIni, family: Family, dims: Any, first_prompt_id: int) -> dict[str, Any]:
    """Read the keys that all families have; virtual tokens begin at first_prompt_id if the file does not say where."""
    section = ini[family.main]
    return {
        "family": family.name,
        "tensors": stored(family.schema(dims), dims),
        "head": family.head,
        "has_tied_head": family.has_tied_head,
        "vocab_size": dims.vocab_size,
        "weight_data_type": section.get("weight_data_type", DATA_TYPE, "fp32"),
        "tensor_para_size": section.find("tensor_para_size", COUNT),
        "prompt_learning_type": section.get("prompt_learning_type", _PROMPT_TYPE, PromptType.NONE),
        "prompt_learning_start_id": section.get("prompt_learning_start_id", INDEX, 0) or first_prompt_id,
        "prompt_tasks": tuple(read_tasks(ini, family).items()),
        "uses_prefixes": family.uses_prefixes,
    }


def id_keys(ini: ConfigIni, family: Family) -> dict[str, int]:
    """Read the ids of start and end."""
    return {
        name: ini[family.main].get(key, INDEX) for name, key in zip(("start_id", "end_id"), family.id_keys, strict=True)
    }


def decoder_keys(ini: ConfigIni, family: Family, dims: Any) -> dict[str, Any]:
    """Read the keys that all decoders have whose tensors are FasterTransformer's, those of common_keys among them."""
    ids = id_keys(ini, family)
    return common_keys(ini, family, dims, ids["end_id"] + 1) | {
        **ids,
        "layernorm_eps": dims.layernorm_eps,
        "head_num": dims.head_num,
        "size_per_head": dims.size_per_head,
        "inter_size": dims.inter_size,
        "num_layer": dims.num_layer,
        "max_pos_seq_len": dims.max_pos_seq_len or NO_POSITION_LIMIT,
        "rotary_dim": dims.rotary_embedding,
    }
