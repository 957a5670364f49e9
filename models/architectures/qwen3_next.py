"""Qwen3-Next: the gated delta rule in most layers, attention with a gate of its output in the others, and experts.

Keys and defaults: transformers, ``configuration_qwen3_next.py``. Layers that predict further tokens (``mtp.``) stand
beside the others in the hub's files; its class passes over them, a training's is written so, and an engine drafts.
"""

from __future__ import annotations

from typing import Any

from models.architecture import Architecture
from models.architectures import llama
from models.blocks import delta_rule
from models.blocks.attention import BY_HEAD, Biases
from models.blocks.feed_forward import FUNCTIONS
from models.blocks.mixture import EveryLayer, Experts, SparseSteps
from models.blocks.predictor import BESIDE, PredictorBeside
from models.blocks.rotary import Rope
from models.blocks.windows import FULL, LINEAR
from models.checks import shown
from models.config_json import ConfigJson
from models.keys import Fields, Key, flag

_SILU = "silu"


class Mixers(EveryLayer):
    """Which layers have attention, as they are listed or every n-th; and which have experts."""

    _KINDS, _PERIOD = "layer_types", "full_attention_interval"

    def read(self, config: ConfigJson) -> dict[str, Any]:
        (blocks,) = super().read(config).values()
        mixers = ("delta" if kind == LINEAR else "attention" for kind in self._kinds(config))
        return {self.says[0]: tuple((mixer, own[1]) for mixer, own in zip(mixers, blocks, strict=True))}

    def write(self, fields: Fields) -> dict[str, Any]:
        """Write the list, and beside it the period that engines of their own read."""
        kinds = [FULL if "attention" in blocks else LINEAR for blocks in fields[self.says[0]]]
        period = kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1
        said = {self._PERIOD: period} if kinds == self._every(period, len(kinds)) else {}
        return {**super().write(fields), self._KINDS: kinds, **said}

    def problems(self, config: ConfigJson) -> list[str]:
        """Refuse another function: the class gives that of the feed-forward to the convolutions as well."""
        word = config.get("hidden_act")
        is_other = LINEAR in self._kinds(config) and FUNCTIONS.get(str(word), _SILU) != _SILU
        found = [f"hidden_act: {shown(word)}  (convolutions of linear layers have {_SILU} here)"] if is_other else []
        return [*super().problems(config), *found]

    def lacks(self, fields: Fields) -> list[str]:
        function, found = fields["feed_forward.activation"], super().lacks(fields)
        if function == _SILU or not any("delta" in blocks for blocks in fields[self.says[0]]):
            return found
        return [*found, f"feed_forward.activation: {function}  (convolutions of linear layers would have it too)"]

    def _kinds(self, config: ConfigJson) -> list[str]:
        return list(config.layer_types() or self._every(config.size(self._PERIOD), config.layer_num))

    @staticmethod
    def _every(period: int, layers: int) -> list[str]:
        return [LINEAR if (layer + 1) % period else FULL for layer in range(layers)]


class MixersAndSteps(Mixers, SparseSteps):
    """Which layers have attention, and experts in every n-th layer but for those that are listed."""


SHARED = {f"shared.{role}": f"mlp.shared_expert.{role}_proj" for role in ("gate", "up", "down")}
QWEN3_NEXT = Architecture(
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    passes_over=("mtp.*",),
    keys=llama.keys(
        rope=Rope(is_partial=True),
        more=[
            Biases("attention_bias"),
            MixersAndSteps(),
            *delta_rule.KEYS,
            PredictorBeside("num_nextn_predict_layers"),
            Experts(count="num_experts"),
            Key("shared_expert_intermediate_size", "mixture.shared_inter_size"),
            Key("norm_topk_prob", "mixture.is_normalised", flag, unset=False),
        ],
    ),
    has={
        "attention.qk_norm": BY_HEAD,
        "attention.has_output_gate": True,
        "norms.is_zero_centred": True,
        "mixture.has_shared_gate": True,
    },
    names={**SHARED, **BESIDE},
    defaults={
        **llama.DEFAULTS,
        **{"num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25},
        **{"full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128},
        **{"linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 512, "num_experts_per_tok": 10},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True},
        **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48},
        "num_attention_heads": 16,
    },
)
