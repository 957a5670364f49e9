"""Decoders as Hugging Face's directories have them: what ``config.json`` describes, by the package ``models``.

What a model is comes from its description alone; no name of an architecture is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from ft_format.layout import StoredTensor
from models.blocks.norms import RMS_NORM
from models.blocks.rotary import Scaling
from models.decoder import Decoder
from models.described import read_directory
from models.directory import CONFIG_FILE
from models.engine_limits import beyond_engine
from models.tensor import Tensor

from ...errors import ConfigJsonError
from ...ops.linear import Norm
from ...ops.positions import RopeScaling
from ..config import NO_POSITION_LIMIT, Layout, ModelConfig
from ..layouts import LayerWeights, StackWeights
from ..reader import Reader


def read(directory: Path, ranks: int) -> ModelConfig:
    """Read ``directory/config.json``, and the special ids that ``generation_config.json`` may name.

    Args:
        directory: of the model.
        ranks: that share a layer; where they are more than the heads of keys and values, each has a copy of a head.

    Raises:
        ConfigJsonError: the file describes no model that is known, or one that this engine does not compute.
    """
    decoder, ids, data_type = read_directory(directory, ConfigJsonError)
    if beyond := beyond_engine(decoder):
        listed = "\n  ".join(beyond)
        raise ConfigJsonError(f"{directory / CONFIG_FILE} describes a network that is not served\n  {listed}")
    copies = max(1, ranks // decoder.kv_head_num)
    copied = replace(decoder, attention=replace(decoder.attention, kv_head_num=decoder.kv_head_num * copies))
    attention, feed_forward, norms = copied.attention, copied.feed_forward, copied.norms
    windows = [layer.window for layer in decoder.layers]
    return ModelConfig(
        family="llama",
        tensors={name: _stored(tensor) for name, tensor in replace(copied, has_tied_head=False).tensors().items()},
        decoder=decoder,
        layout=Layout(f"{decoder.names['embedding']}.weight", partial(_stack, decoder)),
        head=f"{decoder.names['head']}.weight",
        has_tied_head=decoder.has_tied_head,  # a head that is there even so may be another one, and counts
        vocab_size=decoder.vocab_size,
        start_id=ids.start_id,
        end_id=ids.end_id,
        max_pos_seq_len=decoder.max_positions or NO_POSITION_LIMIT,
        prompt_learning_start_id=ids.end_id + 1,
        weight_data_type=data_type,
        model_width=decoder.hidden_units,
        num_layer=decoder.num_layer,
        head_num=attention.head_num,
        kv_head_num=attention.kv_head_num,
        size_per_head=attention.size_per_head,
        attention_scalar=attention.scalar,
        attn_softcap=attention.softcap,
        inter_size=feed_forward.inter_size,
        activation=feed_forward.activation,
        is_gated=feed_forward.is_gated,
        is_rms=norms.kind == RMS_NORM,
        layernorm_eps=norms.eps,
        has_zero_centred_norms=norms.is_zero_centred,
        window=max(windows),
        window_layers="".join(str(int(window > 0)) for window in windows),
        positions="rotary",
        rotary_dim=decoder.layers[0].rotary.width,
        ropes=tuple((layer.rotary.base, _scaling(layer.rotary.scaling)) for layer in decoder.layers),
        embedding_scale=decoder.embedding_scale,
        final_softcap=decoder.final_softcap,
    )


def _stored(tensor: Tensor) -> StoredTensor:
    split_axis = None if tensor.axes[0] == "vocab_size" else tensor.split_axis  # every rank embeds all tokens
    return StoredTensor(tensor.shape, split_axis, is_summed=False)


def _scaling(scaling: Scaling | None) -> RopeScaling | None:
    if scaling is None:
        return None
    waves = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position
    return RopeScaling(scaling.factor, *waves)


def _stack(decoder: Decoder, read: Reader, config: ModelConfig, layers: range) -> StackWeights:
    return StackWeights(
        indices=layers,
        position_bias=None,
        final_norm=read.norm(decoder.names["final_norm"], config),
        layers=tuple(_layer(read, config, decoder.layer_tensors(index)) for index in layers),
    )


def _layer(read: Reader, config: ModelConfig, names: Mapping[str, str]) -> LayerWeights:
    def norm(role: str) -> Norm | None:
        return read.norm(names[role], config) if role in names else None

    up = read.column_parallel(names["up"])
    gate = read.column_parallel(names["gate"]) if config.is_gated else None
    return LayerWeights(
        input_norm=norm("input_norm"),
        qkv=read.column_parallel(names["query"], names["key"], names["value"]),
        attention_out=read.row_parallel(names["attention_output"]),
        post_norm=norm("pre_mlp_norm"),
        mlp_in=gate or up,  # what is called the gate is activated, and multiplies the other
        mlp_gate=up if gate else None,
        mlp_out=read.row_parallel(names["down"]),
        query_norm=norm("query_norm"),
        key_norm=norm("key_norm"),
        attention_output_norm=norm("post_attention_norm"),
        mlp_output_norm=norm("mlp_output_norm"),
    )
