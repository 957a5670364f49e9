"""FasterTransformer's GPT-J: its layout, declared once, and its ``config.ini``.

Layout: FasterTransformer, GptJWeight.cc and GptJDecoderLayerWeight.cc (``loadModel``); keys: GptJTritonModel.cc.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ft_format.config_ini import ConfigIni, Sections
from ft_format.families import gpt
from ft_format.families.family import ConfigValues, Family
from ft_format.families.gpt import GptDims
from ft_format.layout import TensorSpec, in_every_layer
from ft_format.values import FLAG, INDEX

OUTER = {
    "model.wte": TensorSpec(("vocab_size", "hidden_units")),
    "model.final_layernorm.weight": TensorSpec(("hidden_units",)),
    "model.final_layernorm.bias": TensorSpec(("hidden_units",)),
    "model.lm_head.weight": TensorSpec(("vocab_size", "hidden_units")),
}
_HEAD_BIAS = {"model.lm_head.bias": TensorSpec(("vocab_size",))}
# One norm stands before attention and feed-forward, and attention has no biases.
_NOT_ITS = (
    *("post_attention_layernorm.weight", "post_attention_layernorm.bias"),
    *("attention.query_key_value.bias", "attention.dense.bias"),
)
_LAYER = {name: target for name, target in gpt.LAYER.items() if name not in _NOT_ITS}


def schema(dims: GptDims) -> dict[str, TensorSpec]:
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


def read(ini: ConfigIni, has: Callable[[str], bool], position_num: int | None = None) -> GptDims:
    """Read the dimensions; keys and defaults are those of GptJTritonModel.cc, the epsilon a constant there."""
    return replace(read_rotary(ini, "gptj", 1e-6), use_gptj_residual=True)


def read_rotary(ini: ConfigIni, name: str, layernorm_eps: float) -> GptDims:
    """Read the dimensions of a model with rotary positions, which always has a head of its own."""
    section = ini[name]
    sizes = gpt.read_sizes(section, layernorm_eps)
    width = section.get("rotary_embedding", INDEX)
    section.refuse("rotary_embedding", width % 2 == 1 or not 2 <= width <= sizes["size_per_head"])
    return GptDims(
        **sizes,
        max_pos_seq_len=section.get("max_pos_seq_len", INDEX, 0),
        has_untied_head=True,
        rotary_embedding=width,
        use_gptj_residual=section.get("use_gptj_residual", FLAG, True),
        model_variant=section.get("model_variant", str, ""),
    )


FAMILY = Family(
    name="gptj",
    schema=schema,
    config=config,
    read=read,
    sections=("gptj",),
    model_types=("GPT-J",),
    rotates_pairs=True,
    uses_prefixes=True,
)
