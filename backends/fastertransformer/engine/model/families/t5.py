"""T5, T5 v1.1, mT5, UL2 and Megatron's T5, or the encoder of one.

Format: FasterTransformer, ``src/fastertransformer/triton_backend/{t5,t5-encoder}``: the constructors that take a
model_dir. layer_norm_epsilon, which FasterTransformer compiles in, may be said by a key of that name here.
"""

from __future__ import annotations

from typing import Any

from ft_format.config_ini import ConfigIni
from ft_format.families.family import Family
from ft_format.families.t5 import T5Dims
from ft_format.values import INDEX, Values

from ..blocks.attention import GroupedWeights
from ..blocks.feed_forward import DenseWeights
from ..config import NO_POSITION_LIMIT, Layout, ModelConfig, Stack
from ..layouts import CrossWeights, LayerWeights, StackWeights
from ..reader import Reader
from .keys import ACTIVATION, common_keys, exact_form


def _stack_keys(section: Values, dims: T5Dims, num_layer: int, activation: str) -> dict[str, Any]:
    section.refuse("adapter_inter_size", section.get("adapter_inter_size", INDEX, 0) > 0)
    return {
        "head_num": dims.head_num,
        "size_per_head": dims.size_per_head,
        "inter_size": dims.inter_size,
        "num_layer": num_layer,
        "model_width": dims.d_model,
        "is_rms": not dims.has_bias,
        "scales_attention": dims.has_bias,
        "activation": activation,
        "is_gated": dims.is_gated,
        "positions": "relative" if dims.has_relative_positions else "learned",
    }


def read(ini: ConfigIni, family: Family, dims: T5Dims) -> ModelConfig:
    """Read config.ini; dims are what ft_format has read of it."""
    encoder, main = ini["encoder"], family.section(ini)
    has_decoder = "decoder" in family.sections
    default_id = None if has_decoder else 0
    activation = exact_form(encoder.get("feed_forward_proj", ACTIVATION)[0], ini[family.main])
    num_layer = dims.decoder_layer_num if has_decoder else dims.encoder_layer_num
    return ModelConfig(
        **common_keys(ini, family, dims, dims.vocab_size + 1),
        layernorm_eps=dims.layernorm_eps,
        layout=_LAYOUT,
        **_stack_keys(main, dims, num_layer, activation),
        has_decoder=has_decoder,
        encoder=Stack(
            **_stack_keys(encoder, dims, dims.encoder_layer_num, activation), layernorm_eps=dims.layernorm_eps
        ),
        max_pos_seq_len=NO_POSITION_LIMIT if dims.has_relative_positions else dims.position_num,
        start_id=main.get("decoder_start_token_id", INDEX, default_id),
        end_id=main.get("eos_token_id", INDEX, default_id),
        scales_head=dims.has_scaled_logits,
        ia3_num_tasks=dims.ia3_num_tasks,
    )


def _stack(read: Reader, stack: Stack, name: str, layers: range) -> StackWeights:
    bias = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return StackWeights(
        indices=layers,
        position_bias=read.tensor(bias) if bias in read else None,
        final_norm=read.norm(f"{name}.final_layer_norm", stack),
        layers=tuple(
            _layer(read, stack, f"{name}.block.{index}.layer", is_decoder=name == "decoder") for index in layers
        ),
    )


def _layer(read: Reader, stack: Stack, layer: str, is_decoder: bool) -> LayerWeights:
    own, last = f"{layer}.0.SelfAttention", f"{layer}.{2 if is_decoder else 1}"
    dense = f"{last}.DenseReluDense"
    input_norm = read.norm(f"{layer}.0.layer_norm", stack)
    assert input_norm is not None
    ia3 = read.ia3(f"{own}.k", f"{own}.v", dense)
    return LayerWeights(
        input_norm=input_norm,
        attention=GroupedWeights(
            qkv=read.column_parallel(*([f"{own}.qkv"] if is_decoder else [f"{own}.{part}" for part in "qkv"])),
            out=read.row_parallel(f"{own}.o"),
            size_per_head=stack.size_per_head,
            ia3=ia3,
        ),
        post_norm=read.norm(f"{last}.layer_norm", stack),
        feed_forward=DenseWeights(
            into=read.column_parallel(f"{dense}.wi"),
            gate=read.column_parallel(f"{dense}.wi2") if f"{dense}.wi2.weight" in read else None,
            out=read.row_parallel(f"{dense}.wo"),
            activation=stack.activation,
            ia3=ia3[2] if ia3 else None,
        ),
        cross=_cross(read, stack, f"{layer}.1") if is_decoder else None,
    )


def _cross(read: Reader, stack: Stack, layer: str) -> CrossWeights:
    memory, norm = f"{layer}.EncDecAttention", read.norm(f"{layer}.layer_norm", stack)
    assert norm is not None
    return CrossWeights(
        norm=norm,
        query=read.column_parallel(f"{memory}.q"),
        key_value=read.column_parallel(f"{memory}.k", f"{memory}.v"),
        out=read.row_parallel(f"{memory}.o"),
        ia3=read.ia3(f"{memory}.k", f"{memory}.v"),
    )


def _encoder(read: Reader, config: ModelConfig, layers: range) -> StackWeights:
    return _stack(read, config.encoder or config, "encoder", layers)


def _decoder(read: Reader, config: ModelConfig, layers: range) -> StackWeights:
    return _stack(read, config, "decoder", layers)


_LAYOUT = Layout(
    embedding="shared.weight_T", decoder=_decoder, encoder=_encoder, positions="shared.ape", head_bias="shared.bias"
)
