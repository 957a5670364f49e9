"""What megatron-core's configuration says of Llama 4: a norm without weights, chunks, and experts' weighted input.

Semantics: megatron-core 0.20, ``transformer/attention.py`` (the norm is of every layer) and ``moe/experts.py``; and the
specification of layers that NeMo 2 and Megatron-Bridge have (``llama4_utils.py``): the last layer of each period is
neither rotated nor normalised, and all layers see chunks. No temperature of positions is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE
from export_scripts.checkpoints.nemo.gpt_config import YARN
from export_scripts.weights.values import bounded
from ft_format.layout import LARGEST
from models.blocks.attention import UNIT
from models.checks import shown

AS_LLAMA4 = "layers_of_llama_4"
"""The readers' own word: the specification of layers is Llama 4's."""
_NORM, _ON_INPUT = "qk_l2_norm", "moe_apply_probs_on_input"
_PERIOD, _CHUNK, _UNROTATED = "nope_layer_interval", "attention_chunk_size", "no_rope_freq"
OF_LLAMA4 = (_NORM, _ON_INPUT, _PERIOD, _CHUNK)
"""Keys that are honoured."""


def llama4_problems(config: Mapping[str, Any]) -> list[str]:
    """List what has no block here, one line each."""
    is_own = bool(config.get(AS_LLAMA4))
    beside = [key for key in ("qk_layernorm", "multi_latent_attention") if config.get(key)]
    beside += [_UNROTATED] if config.get(_UNROTATED) and not is_own else []
    beside += ["position_embedding_type"] if config.get("position_embedding_type") == YARN else []
    found = [f"{_NORM}: {shown(config[_NORM])}  (beside {', '.join(beside)})"] if beside and config.get(_NORM) else []
    for key in (_PERIOD, _CHUNK):
        if config.get(key) and not is_own:
            found.append(f"{key}: {shown(config[key])}  (the specification of Llama 4's layers alone reads it)")
    if is_own and config.get(_UNROTATED):
        found.append(f"{_UNROTATED}: {shown(config[_UNROTATED])}  (Llama 4's layers do not read it)")
    if is_own and config.get(_CHUNK) is None:
        found.append(f"{_CHUNK}: none  (Llama 4's layers compare a text's length with it)")
    if config.get(_ON_INPUT) and config.get("num_moe_experts") and config.get("moe_router_topk") != 1:
        found.append(f"{_ON_INPUT}: {shown(config[_ON_INPUT])}  (a token has one expert then)")
    return found


def llama4_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of the description that differ from ``fields``.

    Raises:
        CheckpointError: a key is not what it must be.
    """
    layers = fields["num_layer"]
    found: dict[str, Any] = {"attention.qk_norm": UNIT} if config.get(_NORM) else {}
    if config.get(_ON_INPUT) and "mixture.expert_num" in fields:
        found["mixture.is_weighted_before"] = True
    if config.get(AS_LLAMA4):
        period = config.get(_PERIOD)
        step = bounded(period, f"{CONFIG_FILE}: {_PERIOD}", LARGEST) if period is not None else layers + 1
        rotaries = enumerate(fields["layers.rotary"], 1)
        found["layers.rotary"] = tuple(rotary if layer % step else None for layer, rotary in rotaries)
        found["layers.chunk"] = (bounded(config[_CHUNK], f"{CONFIG_FILE}: {_CHUNK}", LARGEST),) * layers
    return found


def llama4_remarks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """List what is to be said."""
    if not (config.get(AS_LLAMA4) and config.get(_PERIOD)):
        return ()
    return (
        f"every layer sees chunks of {shown(config[_CHUNK])} tokens, as the training's did; the published Llama 4 sees "
        f"all tokens in each layer {shown(config[_PERIOD])}, and multiplies queries there by a temperature",
    )
