"""FasterTransformer's GPT-J: its layout, declared once, and its ``config.ini``.

Layout: FasterTransformer, GptJWeight.cc and GptJDecoderLayerWeight.cc (``loadModel``); keys: GptJTritonModel.cc.
"""

from __future__ import annotations

from export_scripts.weights import gpt
from export_scripts.weights.family import ConfigValues, Family
from export_scripts.weights.schema import ModelDims, TargetTensor, in_every_layer
from ft_format.config_ini import Sections

OUTER = {
    "model.wte": TargetTensor(("vocab_size", "hidden_units")),
    "model.final_layernorm.weight": TargetTensor(("hidden_units",)),
    "model.final_layernorm.bias": TargetTensor(("hidden_units",)),
    "model.lm_head.weight": TargetTensor(("vocab_size", "hidden_units")),
}
_HEAD_BIAS = {"model.lm_head.bias": TargetTensor(("vocab_size",))}
# One norm stands before attention and feed-forward, and attention has no biases.
_NOT_ITS = (
    *("post_attention_layernorm.weight", "post_attention_layernorm.bias"),
    *("attention.query_key_value.bias", "attention.dense.bias"),
)
_LAYER = {name: target for name, target in gpt.LAYER.items() if name not in _NOT_ITS}


def schema(dims: ModelDims) -> dict[str, TargetTensor]:
    """List every tensor of a model by name, without ``.<rank>.bin``."""
    return {**OUTER, **_HEAD_BIAS, **in_every_layer(_LAYER, dims.num_layer)}


def config(values: ConfigValues) -> Sections:
    """List ``config.ini``: the keys of FasterTransformer's converter in its order, then those it leaves out.

    FasterTransformer computes GPT-J's norms with an epsilon of 1e-6 and reads no other.
    """
    return rotary_sections("gptj", values)


def rotary_sections(name: str, values: ConfigValues, **more: object) -> Sections:
    """List ``config.ini`` of a model with rotary positions; ``more`` stands where its converter says it."""
    dims = values.dims
    return {
        name: {
            "model_name": name,
            "head_num": dims.head_num,
            "size_per_head": dims.size_per_head,
            "inter_size": dims.inter_size,
            "num_layer": dims.num_layer,
            "rotary_embedding": dims.rotary_embedding,
            "vocab_size": dims.vocab_size,
            "start_id": values.start_id,
            "end_id": values.end_id,
            **more,
            "weight_data_type": values.data_type,
            "tensor_para_size": values.tensor_para_size,
            "max_pos_seq_len": dims.max_pos_seq_len,
            "layernorm_eps": dims.layernorm_eps,
        }
    }


FAMILY = Family("gptj", schema, config)
