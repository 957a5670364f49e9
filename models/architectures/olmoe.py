"""OLMoE: experts in every layer, and norms over the whole projection. Keys: ``configuration_olmoe.py``."""

from __future__ import annotations

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import WHOLE, Biases, Heads
from models.blocks.mixture import EveryLayer, Experts
from models.config_json import ConfigJson
from models.keys import Key, flag


class SquareHeads(Heads):
    """Heads that are as wide together as the model: the norms are, whatever ``head_dim`` says."""

    def problems(self, config: ConfigJson) -> list[str]:
        width, heads = config.head_size, config.size("num_attention_heads")
        wide = config.size("hidden_size")
        return [] if width * heads == wide else [f"head_dim: {width}  (it is hidden_size / num_attention_heads)"]


OLMOE = Architecture(
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    keys=llama.keys(
        heads=SquareHeads(is_square_unsaid=True),
        more=[
            Biases("attention_bias"),
            EveryLayer(),
            Experts(count="num_experts", width="intermediate_size"),
            Key("norm_topk_prob", "mixture.is_normalised", flag, unset=False),
        ],
    ),
    has={"attention.qk_norm": WHOLE},
    defaults={
        **llama.DEFAULTS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    limits={"clip_qkv": ((None,), "queries, keys and values are not clipped")},
    aliases={"num_local_experts": "num_experts"},
)
