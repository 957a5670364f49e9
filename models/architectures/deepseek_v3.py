"""DeepSeek V3, R1 and what has their class, as Moonlight and Kimi K2: latent attention, and experts chosen with a bias.

Keys and defaults: transformers, ``configuration_deepseek_v3.py``. ``scoring_func``, ``topk_method`` and
``moe_layer_freq`` are those of the code on the hub, and vLLM and SGLang read them.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.latent import LatentHeads, LatentRope
from models.blocks.mixture import SIGMOID, EveryLayer, Experts, FirstDense, Groups, SharedExperts
from models.config_json import ConfigJson
from models.keys import Constants, Key, Keys, flag

MIXER = "latent"
HAS = {"mixture.scoring": SIGMOID, "mixture.has_choice_bias": True}
ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
}


def keys(
    layers: EveryLayer, groups: Groups, predictors: str = "num_nextn_predict_layers", more: Sequence[Keys] = ()
) -> tuple[Keys, ...]:
    """List the keys of a relative.

    Args:
        layers: which have experts.
        groups: how experts are chosen.
        predictors: key of how many predictors of further tokens there are; empty: there are none.
        more: those that not all relatives have.
    """
    return llama.keys(
        heads=LatentHeads(),
        rope=LatentRope(),
        more=[
            Key("attention_bias", "latent.has_bias", flag, unset=False),
            layers,
            Experts(count="n_routed_experts"),
            SharedExperts(),
            groups,
            Key("routed_scaling_factor", "mixture.scale", ConfigJson.above_zero),
            *([Key(predictors, "predictor_num", ConfigJson.whole)] if predictors else []),
            *more,
        ],
    )


DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    keys=keys(
        FirstDense(MIXER),
        Groups(),
        more=[
            Key("norm_topk_prob", "mixture.is_normalised", flag, unset=False),
            Key("rope_interleave", "latent.is_interleaved", flag, unset=False),
            Constants({**ROUTER, "moe_layer_freq": 1}),
        ],
    ),
    has=HAS,
    defaults=DEFAULTS,
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)
