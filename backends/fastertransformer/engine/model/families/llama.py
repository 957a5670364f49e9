"""Llama and its relatives: Mistral, Nemotron, Qwen2 and Qwen3, Gemma, Gemma 2 and StarCoder2.

Format: ft_format/families/llama.py. What a model is comes from the keys of config.ini alone; no name of a relative is
looked at.
"""

from __future__ import annotations

from ft_format.config_ini import ConfigIni
from ft_format.families.family import Family
from ft_format.families.llama import EMBEDDING_FILE, LlamaDims
from models.blocks.norms import RMS_NORM
from models.blocks.rotary import Scaling

from ...errors import ConfigIniError
from ...ops.positions import RopeScaling
from ..config import Layout, ModelConfig
from ..layouts import LayerWeights, StackWeights
from ..reader import Reader
from .keys import decoder_keys


def read(ini: ConfigIni, family: Family, dims: LlamaDims) -> ModelConfig:
    """Read config.ini; dims are what ft_format has read of it.

    The longest text is the model's own, as far as the memory of the cache goes; a store that does not say it has
    FasterTransformer's limit.
    """
    if dims.expert_num:
        raise ConfigIniError(
            f"[{family.main}] expert_num = {dims.expert_num}: this engine does not serve mixtures of experts",
            "export the checkpoint with format=huggingface, and serve that directory by an engine that has them",
        )
    rotary, windows = dims.layers[0].rotary, [layer.window for layer in dims.layers]
    return ModelConfig(
        **decoder_keys(ini, family, dims) | ({} if dims.has_untied_head else {"head": ""}),
        layout=_LAYOUT,
        kv_head_num=dims.kv_head_num,
        model_width=dims.hidden_units,
        is_rms=dims.norms.kind == RMS_NORM,
        has_zero_centred_norms=dims.norms.is_zero_centred,
        attention_scalar=dims.attention.scalar,
        attn_softcap=dims.attention.softcap,
        window=max(windows),
        window_layers="".join(str(int(window > 0)) for window in windows),
        activation=dims.feed_forward.activation,
        is_gated=dims.feed_forward.is_gated,
        positions="rotary",
        rope_theta=rotary.base,
        rope_scaling=_rope_scaling(rotary.scaling),
        embedding_scale=dims.embedding_scale,
        final_softcap=dims.final_softcap,
    )


def _rope_scaling(scaling: Scaling | None) -> RopeScaling | None:
    if scaling is None:
        return None
    return RopeScaling(
        scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position=scaling.original_max_position,
    )


def _stack(read: Reader, config: ModelConfig, layers: range) -> StackWeights:
    return StackWeights(
        indices=layers,
        position_bias=None,
        final_norm=read.norm("model.final_layernorm", config),
        layers=tuple(_layer(read, config, f"model.layers.{index}") for index in layers),
    )


def _layer(read: Reader, config: ModelConfig, layer: str) -> LayerWeights:
    input_norm = read.norm(f"{layer}.input_layernorm", config)
    assert input_norm is not None
    up = read.column_parallel(f"{layer}.mlp.up_proj")
    gate = read.column_parallel(f"{layer}.mlp.gate_proj") if config.is_gated else None
    return LayerWeights(
        input_norm=input_norm,
        qkv=read.column_parallel(f"{layer}.attention.query_key_value"),
        attention_out=read.row_parallel(f"{layer}.attention.dense"),
        post_norm=read.norm(f"{layer}.post_attention_layernorm", config),
        mlp_in=gate or up,  # what is called the gate is activated, and multiplies the other
        mlp_gate=up if gate else None,
        mlp_out=read.row_parallel(f"{layer}.mlp.down_proj"),
        query_norm=read.norm(f"{layer}.attention.query_norm", config),
        key_norm=read.norm(f"{layer}.attention.key_norm", config),
        attention_output_norm=read.norm(f"{layer}.attention_output_layernorm", config),
        mlp_output_norm=read.norm(f"{layer}.mlp_output_layernorm", config),
    )


_LAYOUT = Layout(embedding=EMBEDDING_FILE, decoder=_stack)
