"""FasterTransformer's T5: its layout, declared once, and its ``config.ini``.

Layout: FasterTransformer, T5EncoderWeight.cc, T5EncoderLayerWeight.cc, T5DecodingWeight.cc and
T5DecoderLayerWeight.cc (``loadModel``); configuration: T5TritonModel.cc.

Two kinds of model share it. With bias (Megatron's) it has layer norm, attention scores divided by the root of a
head's size, and a bias everywhere; without (T5's own) it has RMS norm, scores as they are, and no bias at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ft_format.config_ini import ConfigIni, Sections
from ft_format.families.family import LAYERS, P_TUNED, SIZE, ConfigValues, Family
from ft_format.layout import FtDims, TensorSpec
from ft_format.values import FLAG, INDEX, Values, fraction

MAX_DISTANCE = 128
"""Distance from which relative positions share a bucket: a constant in FasterTransformer."""
LAYERNORM_EPS = 1e-6
"""Epsilon of every norm: a constant in FasterTransformer."""
GATED_ACTIVATIONS = ("gated-gelu", "geglu", "gated-relu", "reglu", "gated-silu", "SiGLU")
ACTIVATIONS = ("gelu", "relu", "silu", *GATED_ACTIVATIONS)
"""Values of ``feed_forward_proj`` that FasterTransformer knows (activation_types.h); "gelu" is its tanh form."""


@dataclass(frozen=True)
class T5Dims(FtDims):
    """Dimensions and structure of a T5; encoder and decoder differ in their number of layers at most.

    Attributes:
        head_num, size_per_head: attention heads and the width of each; their product need not be d_model.
        d_model: width of the residual stream.
        inter_size: width of the feed-forward's middle.
        encoder_layer_num, decoder_layer_num: transformer blocks.
        vocab_size: rows of the embedding, with the training's padding.
        position_num: buckets of relative positions, or rows of the table of absolute ones.
        has_relative_positions: a bias by distance in the first block of each side; else one table, added to both.
        has_bias: layer norm and biases, as Megatron has them; else RMS norm and none.
        activation: one of ACTIVATIONS.
        has_scaled_logits: the decoder's output is multiplied by d_model**-0.5, as the first T5 does.
        layernorm_eps: of training.
        max_distance: from which relative positions share a bucket; shards have MAX_DISTANCE alone.
        ia3_num_tasks: sets of IA3 vectors.
        adapter_inter_size: width of the middle of linear adapters; 0: there are none.
        has_untied_head: the output projection has a file, be it the embedding's copy.
        has_decoder: False: an encoder that is served alone, without a head.
    """

    head_num: int
    size_per_head: int
    d_model: int
    inter_size: int
    encoder_layer_num: int
    decoder_layer_num: int
    vocab_size: int
    position_num: int
    has_relative_positions: bool = True
    has_bias: bool = False
    activation: str = "relu"
    has_scaled_logits: bool = False
    layernorm_eps: float = LAYERNORM_EPS
    ia3_num_tasks: int = 0
    adapter_inter_size: int = 0
    has_untied_head: bool = True
    has_decoder: bool = True
    max_distance: int = MAX_DISTANCE

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward multiplies two projections."""
        return self.activation in GATED_ACTIVATIONS


_HEADS = ("head_num", "size_per_head")
_PER_MODEL = TensorSpec(("d_model",))
_PROJECTION = TensorSpec(("d_model", _HEADS), split_axis=1)
_PROJECTION_BIAS = TensorSpec((_HEADS,), split_axis=0)
_OUTPUT = TensorSpec((_HEADS, "d_model"), split_axis=0)
_IA3_HEADS = TensorSpec(("ia3_num_tasks", _HEADS), split_axis=1)
_IA3_INTER = TensorSpec(("ia3_num_tasks", "inter_size"), split_axis=1)


def _norm(name: str) -> dict[str, TensorSpec]:
    return {f"{name}.weight": _PER_MODEL, f"{name}.bias": _PER_MODEL}


def _attention(name: str) -> dict[str, TensorSpec]:
    """Attention with q, k and v apart: an encoder's own, and the decoder's to the encoder."""
    return {
        **{f"{name}.{part}.weight": _PROJECTION for part in "qkv"},
        **{f"{name}.{part}.bias": _PROJECTION_BIAS for part in "qkv"},
        f"{name}.o.weight": _OUTPUT,
        f"{name}.o.bias": _PER_MODEL,
        **{f"{name}.{part}.ia3.weight": _IA3_HEADS for part in "kv"},
    }


_FUSED_ATTENTION = {
    "layer.0.SelfAttention.qkv.weight": TensorSpec(("d_model", 3, _HEADS), split_axis=2),
    "layer.0.SelfAttention.qkv.bias": TensorSpec((3, _HEADS), split_axis=1),
    "layer.0.SelfAttention.o.weight": _OUTPUT,
    "layer.0.SelfAttention.o.bias": _PER_MODEL,
    **{f"layer.0.SelfAttention.{part}.ia3.weight": _IA3_HEADS for part in "kv"},
}


def _feed_forward(name: str) -> dict[str, TensorSpec]:
    return {
        **{f"{name}.{part}.weight": TensorSpec(("d_model", "inter_size"), split_axis=1) for part in ("wi", "wi2")},
        **{f"{name}.{part}.bias": TensorSpec(("inter_size",), split_axis=0) for part in ("wi", "wi2")},
        f"{name}.wo.weight": TensorSpec(("inter_size", "d_model"), split_axis=0),
        f"{name}.wo.bias": _PER_MODEL,
        f"{name}.ia3.weight": _IA3_INTER,
    }


def _adapter(name: str) -> dict[str, TensorSpec]:
    """A linear adapter (T5AdapterWeight.cc): its norm has a bias whatever the model has."""
    return {
        f"{name}.layer_norm.weight": _PER_MODEL,
        f"{name}.layer_norm.bias": _PER_MODEL,
        f"{name}.DenseSiluDense.wi.weight": TensorSpec(("d_model", "adapter_inter_size"), split_axis=1),
        f"{name}.DenseSiluDense.wo.weight": TensorSpec(("adapter_inter_size", "d_model"), split_axis=0),
    }


_ADAPTERS = {**_adapter("after_attention_adapter"), **_adapter("after_ffn_adapter")}
_BLOCKS = {
    "encoder": {
        **_norm("layer.0.layer_norm"),
        **_attention("layer.0.SelfAttention"),
        **_norm("layer.1.layer_norm"),
        **_feed_forward("layer.1.DenseReluDense"),
        **_ADAPTERS,
    },
    "decoder": {
        **_norm("layer.0.layer_norm"),
        **_FUSED_ATTENTION,
        **_norm("layer.1.layer_norm"),
        **_attention("layer.1.EncDecAttention"),
        **_norm("layer.2.layer_norm"),
        **_feed_forward("layer.2.DenseReluDense"),
        **_ADAPTERS,
    },
}
HEAD_FILE, _HEAD_BIAS = "lm_head.weight", "shared.bias"
_EMBEDDINGS = {
    "shared.weight_T": TensorSpec(("vocab_size", "d_model")),
    HEAD_FILE: TensorSpec(("vocab_size", "d_model")),
    _HEAD_BIAS: TensorSpec(("vocab_size",)),
}
_ABSOLUTE = {"shared.ape": TensorSpec(("position_num", "d_model"))}
_RELATIVE_NAME = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_RELATIVE = TensorSpec(("head_num", "position_num"), split_axis=0)


def schema(dims: T5Dims) -> dict[str, TensorSpec]:
    """List every tensor of a model by name, without ``.<rank>.bin``.

    FasterTransformer's converters write the output projection always, be it the embedding's copy.
    """
    targets = dict(_EMBEDDINGS)
    if not dims.has_relative_positions:
        targets |= _ABSOLUTE
    for side, layer_num in _sides(dims).items():
        if dims.has_relative_positions:
            targets[f"{side}.{_RELATIVE_NAME}"] = _RELATIVE
        targets |= {f"{side}.{name}": target for name, target in _norm("final_layer_norm").items()}
        for layer in range(layer_num):
            targets |= {f"{side}.block.{layer}.{name}": target for name, target in _BLOCKS[side].items()}
    return {name: target for name, target in targets.items() if _is_part(name, dims)}


def _sides(dims: T5Dims) -> dict[str, int]:
    """List the stacks by name with their numbers of layers."""
    encoder = {"encoder": dims.encoder_layer_num}
    return {**encoder, "decoder": dims.decoder_layer_num} if dims.has_decoder else encoder


def _is_part(name: str, dims: T5Dims) -> bool:
    """Whether a model of this structure has a tensor."""
    if name in (HEAD_FILE, _HEAD_BIAS):
        return dims.has_decoder and (dims.has_untied_head if name == HEAD_FILE else dims.has_bias)
    if "_adapter." in name:
        return dims.adapter_inter_size > 0
    if ".ia3." in name:
        return dims.ia3_num_tasks > 0
    return (dims.has_bias or not name.endswith(".bias")) and (dims.is_gated or ".wi2." not in name)


def config(values: ConfigValues) -> Sections:
    """Lay out ``config.ini`` in the order of FasterTransformer's converter of NeMo's T5.

    ``tie_word_embeddings`` means to FasterTransformer that logits are scaled (T5Decoding.cc), whatever the weights;
    it is read as true where it is missing. The epsilon and the distance are for readers other than FasterTransformer.
    """
    dims: T5Dims = values.dims
    common: Mapping[str, object] = {
        **{"_name_or_path": "t5", "model_type": "T5"},
        "weight_data_type": values.data_type,
        "tensor_para_size": values.tensor_para_size,
        "vocab_size": dims.vocab_size,
    }
    ids = {"decoder_start_token_id": values.start_id, "eos_token_id": values.end_id}
    return {
        "encoder": {**common, **_side(dims, dims.encoder_layer_num)},
        "decoder": {
            **common,
            **ids,
            **_side(dims, dims.decoder_layer_num),
            "tie_word_embeddings": dims.has_scaled_logits,
        },
        "structure": {
            "t5_with_bias": dims.has_bias,
            "position_embedding_type": "relative" if dims.has_relative_positions else "absolute",
            "use_gated_activation": dims.is_gated,
            **({"ia3_num_tasks": dims.ia3_num_tasks} if dims.ia3_num_tasks else {}),
        },
    }


def _side(dims: T5Dims, layer_num: int) -> dict[str, object]:
    adapter = {"has_adapter": True, "adapter_inter_size": dims.adapter_inter_size, "adapter_norm_position": "pre"}
    return {
        "relative_attention_num_buckets_or_max_pos_seq_len": dims.position_num,
        "num_layers": layer_num,
        "d_model": dims.d_model,
        "d_ff": dims.inter_size,
        "num_heads": dims.head_num,
        "d_kv": dims.size_per_head,
        "feed_forward_proj": dims.activation,
        "layer_norm_epsilon": dims.layernorm_eps,
        **({"relative_attention_max_distance": MAX_DISTANCE} if dims.has_relative_positions else {}),
        **(adapter if dims.adapter_inter_size else {}),
    }


_SHARED_BY_SIDES = ("num_heads", "d_kv", "d_model", "d_ff", "vocab_size", "weight_data_type", "adapter_inter_size")


def read(ini: ConfigIni, has: Callable[[str], bool], position_num: int | None = None) -> T5Dims:
    """Read the dimensions; keys and defaults are those of T5TritonModel.cc. An encoder may be there alone."""
    encoder, has_decoder = ini["encoder"], "decoder" in ini
    decoder = ini["decoder"] if has_decoder else encoder
    for key in _SHARED_BY_SIDES:
        encoder.refuse_difference(key, decoder)
    structure = ini.optional("structure")
    has_bias = structure.get("t5_with_bias", FLAG, False)
    return T5Dims(
        head_num=encoder.get("num_heads", SIZE),
        size_per_head=encoder.get("d_kv", SIZE),
        d_model=encoder.get("d_model", SIZE),
        inter_size=encoder.get("d_ff", SIZE),
        encoder_layer_num=encoder.get("num_layers", LAYERS),
        decoder_layer_num=decoder.get("num_layers", LAYERS),
        vocab_size=encoder.get("vocab_size", SIZE),
        position_num=encoder.get("relative_attention_num_buckets_or_max_pos_seq_len", SIZE),
        has_relative_positions=structure.get("position_embedding_type", str, "relative") == "relative",
        has_bias=has_bias,
        activation=_activation(encoder, structure),
        has_scaled_logits=not has_bias and decoder.get("tie_word_embeddings", FLAG, True),  # T5Decoding.cc
        layernorm_eps=encoder.get("layer_norm_epsilon", fraction(), LAYERNORM_EPS),
        ia3_num_tasks=structure.get("ia3_num_tasks", INDEX, 0),
        adapter_inter_size=encoder.get("adapter_inter_size", INDEX, 0),
        has_untied_head=has(HEAD_FILE),
        has_decoder=has_decoder,
    )


def _activation(encoder: Values, structure: Values) -> str:
    """Name the activation; config.ini says apart from it whether there is a gate."""
    name = encoder.get("feed_forward_proj", str, "gelu")
    if structure.get("use_gated_activation", FLAG, False):
        return next(each for each in (name, f"gated-{name}", "gated-gelu") if each in GATED_ACTIVATIONS)
    return name.removeprefix("gated-")


FAMILY = Family(
    name="t5",
    schema=schema,
    config=config,
    read=read,
    sections=("decoder", "encoder"),
    model_types=("T5",),
    head=HEAD_FILE,
    has_tied_head=True,
    id_keys=("decoder_start_token_id", "eos_token_id"),
    width="d_model",
    prompt_types=(P_TUNED,),
    is_encoder_decoder=True,
)
ENCODER = replace(
    FAMILY,
    name="t5-encoder",
    schema=lambda dims: schema(replace(dims, has_decoder=False)),
    sections=("encoder",),
    model_types=("T5-Encoder",),
)
"""The encoder of a T5, served alone from the same directory."""
