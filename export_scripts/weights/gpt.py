"""FasterTransformer's GPT and its variants: the layout, declared once, and ``config.ini``.

Layout: FasterTransformer, ParallelGptWeight.cc and ParallelGptDecoderLayerWeight.cc (``loadModel``); keys:
ParallelGptTritonModel.cc.
"""

from __future__ import annotations

from export_scripts.weights.family import ConfigValues, Family
from export_scripts.weights.schema import ModelDims, TargetTensor, in_every_layer
from ft_format.config_ini import Sections

_HEADS = ("head_num", "size_per_head")

_EMBEDDING = {"model.wte": TargetTensor(("vocab_size", "hidden_units"))}
_POSITIONS = {"model.wpe": TargetTensor(("max_pos_seq_len", "hidden_units"))}
_PRE_NORM = {
    "model.pre_decoder_layernorm.weight": TargetTensor(("hidden_units",)),
    "model.pre_decoder_layernorm.bias": TargetTensor(("hidden_units",)),
}
_POST_NORM = {
    "model.final_layernorm.weight": TargetTensor(("hidden_units",)),
    "model.final_layernorm.bias": TargetTensor(("hidden_units",)),
}
_HEAD = {"model.lm_head.weight": TargetTensor(("vocab_size", "hidden_units"))}
LAYER = {
    "input_layernorm.weight": TargetTensor(("hidden_units",)),
    "input_layernorm.bias": TargetTensor(("hidden_units",)),
    "attention.query_key_value.weight": TargetTensor(("hidden_units", 3, _HEADS), split_axis=2),
    "attention.query_key_value.bias": TargetTensor((3, _HEADS), split_axis=1),
    "attention.dense.weight": TargetTensor(("hidden_units", "hidden_units"), split_axis=0),
    "attention.dense.bias": TargetTensor(("hidden_units",)),
    "post_attention_layernorm.weight": TargetTensor(("hidden_units",)),
    "post_attention_layernorm.bias": TargetTensor(("hidden_units",)),
    "mlp.dense_h_to_4h.weight": TargetTensor(("hidden_units", "inter_size"), split_axis=1),
    "mlp.dense_h_to_4h.bias": TargetTensor(("inter_size",), split_axis=0),
    "mlp.dense_4h_to_h.weight": TargetTensor(("inter_size", "hidden_units"), split_axis=0),
    "mlp.dense_4h_to_h.bias": TargetTensor(("hidden_units",)),
}


def schema(dims: ModelDims) -> dict[str, TargetTensor]:
    """List every tensor of a model by name, without ``.<rank>.bin``."""
    return {
        **_EMBEDDING,
        **(_POSITIONS if dims.has_positional_encoding else {}),
        **(_PRE_NORM if dims.has_pre_decoder_layernorm else {}),
        **(_POST_NORM if dims.has_post_decoder_layernorm else {}),
        **(_HEAD if dims.has_untied_head else {}),
        **in_every_layer(LAYER, dims.num_layer),
    }


def config(values: ConfigValues) -> Sections:
    """List ``config.ini``: the keys of FasterTransformer's converter in its order, then those it leaves out.

    FasterTransformer reads layernorm_eps with a default of 1e-6 where NeMo trains with 1e-5.
    """
    dims = values.dims
    return {
        "gpt": {
            "model_name": "gpt",
            "tensor_para_size": values.tensor_para_size,
            "head_num": dims.head_num,
            "size_per_head": dims.size_per_head,
            "inter_size": dims.inter_size,
            "num_layer": dims.num_layer,
            **({"max_pos_seq_len": dims.max_pos_seq_len} if dims.max_pos_seq_len else {}),
            "weight_data_type": values.data_type,
            "vocab_size": dims.vocab_size,
            "start_id": values.start_id,
            "end_id": values.end_id,
            "layernorm_eps": dims.layernorm_eps,
            "layernorm_type": dims.layernorm_type,
            "activation_type": dims.activation_type,
            "has_positional_encoding": int(dims.has_positional_encoding),
            "has_pre_decoder_layernorm": int(dims.has_pre_decoder_layernorm),
            "has_post_decoder_layernorm": int(dims.has_post_decoder_layernorm),
            "use_attention_linear_bias": int(dims.use_attention_linear_bias),
            **({"model_variant": dims.model_variant} if dims.model_variant else {}),
        }
    }


FAMILY = Family("gpt", schema, config)
