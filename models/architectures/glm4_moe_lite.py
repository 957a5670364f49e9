"""GLM-4.7-Flash: DeepSeek V3's blocks. Keys and defaults: transformers, ``configuration_glm4_moe_lite.py``.

Its class lists which layers have experts, and passes over ``first_k_dense_replace``, which vLLM and SGLang read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from models.architecture import Architecture
from models.architectures import deepseek_v3
from models.blocks.mixture import FirstDense, Groups
from models.checks import shown
from models.config_json import ConfigJson
from models.errors import ModelError
from models.keys import Constants, Fields, Key, flag

_KINDS, _FIRST = "mlp_layer_types", "first_k_dense_replace"
_DENSE, _SPARSE = "dense", "sparse"


class ListedDense(FirstDense):
    """The first layers have one feed-forward: they are listed, and counted beside the list."""

    def sparse(self, config: ConfigJson) -> Sequence[bool]:
        kinds, layers = config.get(_KINDS), config.layer_num
        if kinds is None:
            return [layer >= 1 for layer in range(layers)]
        if not isinstance(kinds, (list, tuple)) or len(kinds) != layers or set(kinds) - {_DENSE, _SPARSE}:
            raise ModelError(f"config.json: {_KINDS} is {shown(kinds)}, not {_DENSE} or {_SPARSE} for each layer")
        return [kind == _SPARSE for kind in kinds]

    def write(self, fields: Fields) -> dict[str, Any]:
        blocks = fields[self.says[0]]
        return {**super().write(fields), _KINDS: [_SPARSE if "mixture" in each else _DENSE for each in blocks]}

    def problems(self, config: ConfigJson) -> list[str]:
        sparse = self.sparse(config)
        counted = config.get(_FIRST, sparse.index(True) if any(sparse) else len(sparse))
        if sparse == [layer >= counted for layer in range(len(sparse))]:
            return []
        return [f"{_FIRST}: {shown(counted)}  (the class reads {_KINDS}, whose dense layers are others)"]


GLM4_MOE_LITE = Architecture(
    model_type="glm4_moe_lite",
    class_name="Glm4MoeLiteForCausalLM",
    keys=deepseek_v3.keys(
        ListedDense(deepseek_v3.MIXER),
        Groups(),
        more=[
            Key("norm_topk_prob", "mixture.is_normalised", flag, unset=False),
            Key("rope_interleave", "latent.is_interleaved", flag, unset=False),
            Constants(deepseek_v3.ROUTER),
        ],
    ),
    has=deepseek_v3.HAS,
    defaults={
        **{key: value for key, value in deepseek_v3.DEFAULTS.items() if key != _FIRST},
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
    },
    aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
)
