"""Qwen3.5 and 3.6 without experts: Qwen3-Next's mixers, whose linear layers are stored by kind, and one feed-forward.

Keys and defaults: transformers, ``configuration_qwen3_5.py``. Layers that predict further tokens (``mtp.``) stand
beside the others in the hub's files; its class passes over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from models.architecture import Architecture
from models.architectures import llama
from models.architectures.qwen3_next import Mixers
from models.blocks import delta_rule
from models.blocks.attention import BY_HEAD, Biases
from models.blocks.predictor import BESIDE, PredictorBeside
from models.blocks.rotary import Rope
from models.config_json import ConfigJson
from models.keys import Keys


class MixersAlone(Mixers):
    """Which layers have attention; none has experts."""

    def sparse(self, config: ConfigJson) -> Sequence[bool]:
        return [False] * config.layer_num


def keys(mixers: Keys, more: Sequence[Keys] = ()) -> tuple[Keys, ...]:
    """List the keys; ``more`` are those of experts."""
    own = (Biases("attention_bias"), mixers, PredictorBeside("mtp_num_hidden_layers"))
    return llama.keys(rope=Rope(is_partial=True), more=(*own, *delta_rule.KEYS, *more))


HAS: dict[str, Any] = {
    "attention.qk_norm": BY_HEAD,
    "attention.has_output_gate": True,
    "norms.is_zero_centred": True,
    "delta.is_by_kind": True,
}
DEFAULTS = {
    **llama.DEFAULTS,
    **{"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25},
    **{"full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32},
    "num_attention_heads": 16,
}
QWEN3_5_TEXT = Architecture(
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    passes_over=("mtp.*",),
    keys=keys(MixersAlone()),
    has=HAS,
    names=BESIDE,
    defaults=DEFAULTS,
)
