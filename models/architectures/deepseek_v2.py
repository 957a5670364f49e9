"""DeepSeek V2 and V2-Lite: V3's blocks, with experts that are chosen by a softmax alone.

Keys and defaults: transformers, ``configuration_deepseek_v2.py``; its class passes over ``norm_topk_prob``, which the
code on the hub reads.
"""

from __future__ import annotations

from typing import Any, ClassVar

from models.architecture import Architecture
from models.architectures import deepseek_v3, llama
from models.blocks.mixture import FirstDense, Groups
from models.checks import shown
from models.config_json import ConfigJson
from models.keys import Constants, Fields


class MethodAndGroups(Groups):
    """Experts are chosen of all, or of some groups whose best expert is best: ``topk_method`` says which."""

    says: ClassVar[tuple[str, ...]] = (*Groups.says, "mixture.is_group_of_two")
    _METHOD, _OF_ALL, _OF_GROUPS = "topk_method", "greedy", "group_limited_greedy"

    def read(self, config: ConfigJson) -> dict[str, Any]:
        if config.get(self._METHOD) == self._OF_ALL:
            return dict(zip(self.says, (1, 1, True), strict=True))
        found = super().read(config)
        return {**found, self.says[2]: found[self.says[0]] == 1}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {self._METHOD: self._OF_GROUPS if fields[self.says[0]] > 1 else self._OF_ALL, **super().write(fields)}

    def problems(self, config: ConfigJson) -> list[str]:
        said, legal = config.get(self._METHOD), (self._OF_ALL, self._OF_GROUPS)
        return super().problems(config) if said in legal else [f"{self._METHOD}: {shown(said)}  (it has {legal})"]

    def lacks(self, fields: Fields) -> list[str]:
        if fields[self.says[0]] > 1 and fields[self.says[2]]:
            return [f"{self.says[2]}: True  (a group counts as its best expert)"]
        return super().lacks(fields)


DEEPSEEK_V2 = Architecture(
    model_type="deepseek_v2",
    class_name="DeepseekV2ForCausalLM",
    keys=deepseek_v3.keys(
        FirstDense(deepseek_v3.MIXER),
        MethodAndGroups(),
        predictors="",
        more=[Constants({"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1})],
    ),
    has={"mixture.is_normalised": False},
    defaults={
        **llama.DEFAULTS,
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
    },
    limits={"mlp_bias": ((False, None), "feed-forwards have no biases")},
    aliases={"num_experts": "n_routed_experts"},
)
