"""FasterTransformer's GPT-J: its layout, declared once, and its ``config.ini``.

Layout: FasterTransformer, GptJWeight.cc and GptJDecoderLayerWeight.cc (``loadModel``); keys: GptJTritonModel.cc.
"""

from __future__ import annotations

from export_scripts.weights.family import ConfigValues, Family, Sections
from export_scripts.weights.schema import ModelDims, TargetTensor

_HEADS = ("head_num", "size_per_head")

_OUTER = {
    "model.wte": TargetTensor(("vocab_size", "hidden_units")),
    "model.final_layernorm.weight": TargetTensor(("hidden_units",)),
    "model.final_layernorm.bias": TargetTensor(("hidden_units",)),
    "model.lm_head.weight": TargetTensor(("vocab_size", "hidden_units")),
    "model.lm_head.bias": TargetTensor(("vocab_size",)),
}
_LAYER = {
    "input_layernorm.weight": TargetTensor(("hidden_units",)),
    "input_layernorm.bias": TargetTensor(("hidden_units",)),
    "attention.query_key_value.weight": TargetTensor(("hidden_units", 3, _HEADS), split_axis=2),
    "attention.dense.weight": TargetTensor(("hidden_units", "hidden_units"), split_axis=0),
    "mlp.dense_h_to_4h.weight": TargetTensor(("hidden_units", "inter_size"), split_axis=1),
    "mlp.dense_h_to_4h.bias": TargetTensor(("inter_size",), split_axis=0),
    "mlp.dense_4h_to_h.weight": TargetTensor(("inter_size", "hidden_units"), split_axis=0),
    "mlp.dense_4h_to_h.bias": TargetTensor(("hidden_units",)),
}


def schema(dims: ModelDims) -> dict[str, TargetTensor]:
    """List every tensor of a model by name, without ``.<rank>.bin``."""
    layers = {
        f"model.layers.{layer}.{name}": target for layer in range(dims.num_layer) for name, target in _LAYER.items()
    }
    return {**_OUTER, **layers}


def config(values: ConfigValues) -> Sections:
    """List ``config.ini``: the keys of FasterTransformer's converter in its order, then those it leaves out.

    FasterTransformer computes GPT-J's norms with an epsilon of 1e-6 and reads no other.
    """
    dims = values.dims
    return {
        "gptj": {
            "model_name": "gptj",
            "head_num": dims.head_num,
            "size_per_head": dims.size_per_head,
            "inter_size": dims.inter_size,
            "num_layer": dims.num_layer,
            "rotary_embedding": dims.rotary_embedding,
            "vocab_size": dims.vocab_size,
            "start_id": values.start_id,
            "end_id": values.end_id,
            "weight_data_type": values.data_type,
            "tensor_para_size": values.tensor_para_size,
            "max_pos_seq_len": dims.max_pos_seq_len,
            "layernorm_eps": dims.layernorm_eps,
        }
    }


FAMILY = Family("gptj", schema, config)
