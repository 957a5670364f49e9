"""EXAONE with experts (K-EXAONE): EXAONE 4's windows and rotation, norms before the blocks, experts chosen in groups.

Keys: transformers, ``configuration_exaone_moe.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from models.architecture import Architecture
from models.architectures import llama
from models.architectures.exaone4 import RopeInWindows
from models.blocks.attention import BY_HEAD, Biases
from models.blocks.mixture import SIGMOID, EveryLayer, Experts, FirstDense, Groups, SharedExperts
from models.config_json import ConfigJson
from models.errors import ModelError
from models.keys import Fields, Key, flag


class RopeInWindowsAlone(RopeInWindows):
    """A rotation in the layers that have a window; the others never rotate."""

    def problems(self, config: ConfigJson) -> list[str]:
        none = ["sliding_window: none  (its class takes a number)"] if config.get("sliding_window") is None else []
        return none + super().problems(config)

    def lacks(self, fields: Fields) -> list[str]:
        if any(fields["layers.window"]) or not any(fields["layers.rotary"]):
            return super().lacks(fields)
        return ["layers.window: 0  (layers without a window do not rotate)"]


class ListedLayers(EveryLayer):
    """Which layers have experts, one by one; without a list, those behind the first dense ones.

    SGLang and Megatron-Bridge read ``is_moe_layer``, which stands beside the list on the hub.
    """

    _KINDS, _WORDS, _FLAGS = "mlp_layer_types", ("dense", "sparse"), "is_moe_layer"

    def sparse(self, config: ConfigJson) -> Sequence[bool]:
        kinds = config.get(self._KINDS)
        if kinds is None:
            return FirstDense().sparse(config)
        if not isinstance(kinds, (list, tuple)) or len(kinds) != config.layer_num or set(kinds) - set(self._WORDS):
            raise ModelError(f"config.json: {self._KINDS} does not say dense or sparse of each layer")
        return [kind == self._WORDS[1] for kind in kinds]

    def write(self, fields: Fields) -> dict[str, Any]:
        sparse = ["mixture" in blocks for blocks in fields[self.says[0]]]
        return {self._KINDS: [self._WORDS[each] for each in sparse], self._FLAGS: sparse}


EXAONE_MOE = Architecture(
    model_type="exaone_moe",
    class_name="ExaoneMoeForCausalLM",
    keys=llama.keys(
        rope=RopeInWindowsAlone(),
        more=[
            Biases(),
            ListedLayers(),
            Experts(count="num_experts"),
            SharedExperts("num_shared_experts"),
            Groups("num_experts"),
            Key("norm_topk_prob", "mixture.is_normalised", flag, unset=False),
            Key("routed_scaling_factor", "mixture.scale", ConfigJson.number),
        ],
    ),
    has={"attention.qk_norm": BY_HEAD, "mixture.scoring": SIGMOID, "mixture.has_choice_bias": True},
    names={"choice_bias": "mlp.e_score_correction_bias"},
    passes_over=("mtp.*",),
    defaults={
        **llama.DEFAULTS,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
)
