"""FasterTransformer's GPT and its variants: the layout, declared once, and ``config.ini``.

Layout: FasterTransformer, ParallelGptWeight.cc and ParallelGptDecoderLayerWeight.cc (``loadModel``); keys:
ParallelGptTritonModel.cc.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ft_format.config_ini import ConfigIni, Sections
from ft_format.families.family import LAYERS, SIZE, ConfigValues, Family
from ft_format.layout import FtDims, TensorSpec, in_every_layer
from ft_format.values import FLAG, INDEX, Values, fraction


@dataclass(frozen=True)
class GptDims(FtDims):
    """Dimensions of a decoder-only model: GPT, GPT-J and GPT-NeoX.

    Attributes:
        head_num, size_per_head: attention heads and the width of each.
        inter_size: width of the feed-forward's middle.
        num_layer: transformer blocks.
        max_pos_seq_len: rows of the position table.
        vocab_size: rows of the embedding, with the training's padding.
        layernorm_eps: epsilon of every layer norm.
        has_untied_head: the output projection has weights of its own.
        activation_type: of the feed-forward, as FasterTransformer calls it: Gelu (its tanh form) or Relu.
        layernorm_type: pre_layernorm or post_layernorm.
        has_positional_encoding: there is a position table.
        has_pre_decoder_layernorm, has_post_decoder_layernorm: norms before the first and after the last layer.
        use_attention_linear_bias: ALiBi.
        rotary_embedding: width of a head that is rotated by position.
        use_gptj_residual: attention and feed-forward run side by side, on the same input.
        model_variant: FasterTransformer's name of a variant of GPT; empty: it has none.
        adapter_inter_size: width of the middle of adapters; 0: there are none.
    """

    head_num: int
    size_per_head: int
    inter_size: int
    num_layer: int
    max_pos_seq_len: int
    vocab_size: int
    layernorm_eps: float = 1e-5
    has_untied_head: bool = False
    activation_type: str = "Gelu"
    layernorm_type: str = "pre_layernorm"
    has_positional_encoding: bool = True
    has_pre_decoder_layernorm: bool = False
    has_post_decoder_layernorm: bool = True
    use_attention_linear_bias: bool = False
    rotary_embedding: int = 0
    use_gptj_residual: bool = False
    model_variant: str = ""
    adapter_inter_size: int = 0

    @property
    def positions(self) -> str:
        """How a layer knows positions: rotary, alibi, learned (a table that is added) or none."""
        if self.rotary_embedding:
            return "rotary"
        if self.use_attention_linear_bias:
            return "alibi"
        return "learned" if self.has_positional_encoding else "none"

    @property
    def hidden_units(self) -> int:
        """Width of the residual stream."""
        return self.head_num * self.size_per_head


_HEADS = ("head_num", "size_per_head")
HEAD_FILE = "model.lm_head.weight"

_EMBEDDING = {"model.wte": TensorSpec(("vocab_size", "hidden_units"))}
_POSITIONS = {"model.wpe": TensorSpec(("max_pos_seq_len", "hidden_units"))}
_PRE_NORM = {
    "model.pre_decoder_layernorm.weight": TensorSpec(("hidden_units",)),
    "model.pre_decoder_layernorm.bias": TensorSpec(("hidden_units",)),
}
_POST_NORM = {
    "model.final_layernorm.weight": TensorSpec(("hidden_units",)),
    "model.final_layernorm.bias": TensorSpec(("hidden_units",)),
}
_HEAD = {HEAD_FILE: TensorSpec(("vocab_size", "hidden_units"))}
LAYER = {
    "input_layernorm.weight": TensorSpec(("hidden_units",)),
    "input_layernorm.bias": TensorSpec(("hidden_units",)),
    "attention.query_key_value.weight": TensorSpec(("hidden_units", 3, _HEADS), split_axis=2),
    "attention.query_key_value.bias": TensorSpec((3, _HEADS), split_axis=1),
    "attention.dense.weight": TensorSpec(("hidden_units", "hidden_units"), split_axis=0),
    "attention.dense.bias": TensorSpec(("hidden_units",)),
    "post_attention_layernorm.weight": TensorSpec(("hidden_units",)),
    "post_attention_layernorm.bias": TensorSpec(("hidden_units",)),
    "mlp.dense_h_to_4h.weight": TensorSpec(("hidden_units", "inter_size"), split_axis=1),
    "mlp.dense_h_to_4h.bias": TensorSpec(("inter_size",), split_axis=0),
    "mlp.dense_4h_to_h.weight": TensorSpec(("inter_size", "hidden_units"), split_axis=0),
    "mlp.dense_4h_to_h.bias": TensorSpec(("hidden_units",)),
}


_ADAPTER = {
    "dense_h_to_4h.weight": TensorSpec(("hidden_units", "adapter_inter_size"), split_axis=1),
    "dense_h_to_4h.bias": TensorSpec(("adapter_inter_size",), split_axis=0),
    "dense_4h_to_h.weight": TensorSpec(("adapter_inter_size", "hidden_units"), split_axis=0),
    "dense_4h_to_h.bias": TensorSpec(("hidden_units",)),
}
_ADAPTERS = {
    f"{place}.{name}": spec
    for place in ("after_attention_adapter", "after_ffn_adapter")
    for name, spec in _ADAPTER.items()
}


def schema(dims: GptDims) -> dict[str, TensorSpec]:
    """List every tensor of a model by name, without ``.<rank>.bin``."""
    return {
        **_EMBEDDING,
        **(_POSITIONS if dims.has_positional_encoding else {}),
        **(_PRE_NORM if dims.has_pre_decoder_layernorm else {}),
        **(_POST_NORM if dims.has_post_decoder_layernorm else {}),
        **(_HEAD if dims.has_untied_head else {}),
        **in_every_layer({**LAYER, **(_ADAPTERS if dims.adapter_inter_size else {})}, dims.num_layer),
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


def read_sizes(section: Values, layernorm_eps: float) -> dict[str, Any]:
    """Read what every decoder-only family calls alike.

    Args:
        section: the family's.
        layernorm_eps: that FasterTransformer computes norms with where the key is missing.
    """
    return {
        **{key: section.get(key, SIZE) for key in ("head_num", "size_per_head", "inter_size", "vocab_size")},
        "num_layer": section.get("num_layer", LAYERS),
        "layernorm_eps": section.get("layernorm_eps", fraction(), layernorm_eps),
    }


def read(ini: ConfigIni, has: Callable[[str], bool], position_num: int | None = None) -> GptDims:
    """Read the dimensions; keys and defaults are those of ParallelGptTritonModel.cc."""
    section = ini["gpt"]
    sizes = read_sizes(section, 1e-6)
    has_table = section.get("has_positional_encoding", FLAG, True)
    has_adapters = section.get("has_adapters", FLAG, False)
    return GptDims(
        **sizes,
        max_pos_seq_len=section.get("max_pos_seq_len", SIZE if has_table else INDEX, position_num if has_table else 0),
        has_untied_head=has(HEAD_FILE),
        activation_type=section.get("activation_type", str, "Gelu"),
        layernorm_type=section.get("layernorm_type", str, "pre_layernorm"),
        has_positional_encoding=has_table,
        has_pre_decoder_layernorm=section.get("has_pre_decoder_layernorm", FLAG, False),
        has_post_decoder_layernorm=section.get("has_post_decoder_layernorm", FLAG, True),
        use_attention_linear_bias=section.get("use_attention_linear_bias", FLAG, False),
        model_variant=section.get("model_variant", str, ""),
        adapter_inter_size=section.get("adapter_inter_size", SIZE, sizes["inter_size"]) if has_adapters else 0,
    )


FAMILY = Family("gpt", schema, config, read, sections=("gpt",), model_types=("GPT",), has_tied_head=True)
