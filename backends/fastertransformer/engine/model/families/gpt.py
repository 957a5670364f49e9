"""GPT, and by their keys OPT, BLOOM and XGLM; GPT-J and GPT-NeoX, which have a rotary embedding.

Format: FasterTransformer, ``src/fastertransformer/triton_backend/{multi_gpu_gpt,gptj,gptneox}``: the constructors that
take a model_dir, which give most architecture keys a default. layernorm_eps, which FasterTransformer compiles in for
GPT-J and GPT-NeoX, may be said by a key of that name here.
"""

from __future__ import annotations

from ft_format.config_ini import ConfigIni
from ft_format.families.family import Family
from ft_format.families.gpt import GptDims
from ft_format.values import one_of

from ..blocks.attention import GroupedWeights
from ..blocks.feed_forward import DenseWeights
from ..config import Layout, ModelConfig
from ..layouts import LayerWeights, StackWeights
from ..reader import Reader
from .keys import ACTIVATION, PLAIN_GELU, decoder_keys, exact_form

_NORM = one_of({"pre_layernorm": True, "post_layernorm": False})


def read(ini: ConfigIni, family: Family, dims: GptDims) -> ModelConfig:
    """Read config.ini; dims are what ft_format has read of it."""
    section = ini[family.main]
    section.refuse("has_adapters", dims.adapter_inter_size > 0)
    has_alibi, has_table = dims.use_attention_linear_bias, dims.has_positional_encoding
    section.refuse("use_attention_linear_bias", has_alibi and has_table)
    activation, is_gated = section.get("activation_type", ACTIVATION, PLAIN_GELU)
    section.refuse("activation_type", is_gated)
    activation = exact_form(activation, section)
    return ModelConfig(
        **decoder_keys(ini, family, dims),
        layout=_LAYOUT,
        is_pre_norm=section.get("layernorm_type", _NORM, True),
        is_parallel=dims.use_gptj_residual,
        activation=activation,
        positions=dims.positions,
        rotates_pairs=family.rotates_pairs,
    )


def _stack(read: Reader, config: ModelConfig, layers: range) -> StackWeights:
    return StackWeights(
        indices=layers,
        position_bias=read.slopes(config.head_num) if config.positions == "alibi" else None,
        final_norm=read.norm("model.final_layernorm", config),
        layers=tuple(_layer(read, config, f"model.layers.{index}") for index in layers),
    )


def _layer(read: Reader, config: ModelConfig, layer: str) -> LayerWeights:
    input_norm = read.norm(f"{layer}.input_layernorm", config)
    assert input_norm is not None
    return LayerWeights(
        input_norm=input_norm,
        attention=GroupedWeights(
            qkv=read.column_parallel(f"{layer}.attention.query_key_value"),
            out=read.row_parallel(f"{layer}.attention.dense"),
            size_per_head=config.size_per_head,
        ),
        post_norm=read.norm(f"{layer}.post_attention_layernorm", config),
        feed_forward=DenseWeights(
            into=read.column_parallel(f"{layer}.mlp.dense_h_to_4h"),
            gate=None,
            # A parallel GPT-NeoX has one bias for attention and MLP together.
            out=read.row_parallel(
                f"{layer}.mlp.dense_4h_to_h", f"{layer}.mlp.dense_4h_to_h.bias", f"{layer}.mlp.attention.bias.sum"
            ),
            activation=config.activation,
        ),
    )


_LAYOUT = Layout(embedding="model.wte", decoder=_stack, positions="model.wpe", head_bias="model.lm_head.bias")
