"""Qwen3.5 and 3.6 with experts in every layer: Qwen3.5's mixers, and Qwen3-Next's experts, whose scores are normalised.

Keys and defaults: transformers, ``configuration_qwen3_5_moe.py``.
"""

from __future__ import annotations

from models.architecture import Architecture
from models.architectures import qwen3_5_text
from models.architectures.qwen3_next import SHARED, Mixers
from models.blocks.mixture import Experts
from models.blocks.predictor import BESIDE
from models.keys import Constants, Key

QWEN3_5_MOE_TEXT = Architecture(
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    passes_over=("mtp.*",),
    keys=qwen3_5_text.keys(
        Mixers(),
        more=(
            Experts(count="num_experts"),
            Key("shared_expert_intermediate_size", "mixture.shared_inter_size"),
            Constants({"norm_topk_prob": True}),
        ),
    ),
    has={**qwen3_5_text.HAS, "mixture.has_shared_gate": True},
    names={**SHARED, **BESIDE},
    defaults={
        **qwen3_5_text.DEFAULTS,
        **{"num_key_value_heads": 2, "hidden_size": 2048, "num_hidden_layers": 40, "num_experts": 256},
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        "intermediate_size": 512,
    },
)
