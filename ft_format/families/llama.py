"""Llama in the community's FasterTransformer layout: a dialect of the decoders in models/, for what that computes.

Layout and keys: FasterTransformer's Llama of void-main, LlamaWeight.cc, LlamaDecoderLayerWeight.cc and
LlamaTritonModel.cc; kv_head_num, rope_theta and rope_scaling_factor are those of its branches with grouped queries.
Two keys are ours, which change nothing that those compute: ``has_untied_head`` = 0 where the head's file is a copy of
the embedding, and ``kv_head_copies``. What they compute otherwise of a decoder, ``beyond`` lists: that has no shards.

Every matrix of a layer is the model's own, turned around. A rank's file of query, key and value holds the rank's
columns of each side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import models
from ft_format.config_ini import ConfigIni, Sections
from ft_format.families.family import LAYERS, SIZE, ConfigValues, Family
from ft_format.layout import LARGEST, TensorSpec
from ft_format.values import COUNT, FLAG, INDEX, decimal, fraction
from models.blocks.rope_scaling import Linear
from models.blocks.rotary import Rotary
from models.decoder import Decoder
from models.tensor import Tensor

SECTION = "llama"
EMBEDDING_FILE, HEAD_FILE, FINAL_NORM = "model.wte.weight", "model.lm_head.weight", "model.final_layernorm"
KV_COPIES = "kv_head_copies"
"""Key: how many equal heads of keys and values follow one another, in files for more ranks than heads."""
_UNTIED = "has_untied_head"
_FUSED = ("query", "key", "value")
_FILES = {
    **dict.fromkeys(_FUSED, "attention.query_key_value"),
    "input_norm": "input_layernorm",
    "pre_mlp_norm": "post_attention_layernorm",
    "attention_output": "attention.dense",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Files of a layer by the role of what they hold."""
_DEFAULTS: Mapping[str, Any] = {"rope_theta": 10000.0, "rope_scaling_factor": 1.0, _UNTIED: True, KV_COPIES: 1}
_NO_BIASES = "it has no biases"
_REASONS = {
    "hidden_units": "its width is head_num * size_per_head",
    "layers.rotary": "it rotates all layers alike, and divides positions by one factor",
    "layers.window": "every token sees all before it",
    "norms.kind": "it has RMS norm without a bias",
    "norms.is_zero_centred": "it multiplies by the weights as they are",
    **dict.fromkeys(("norms.is_before", "norms.is_after"), "it has norms before attention and feed-forward alone"),
    "feed_forward.activation": "it has SiLU",
    "feed_forward.is_gated": "its feed-forward has a gate",
    **dict.fromkeys(("layers.blocks", "mixture"), "its layers are attention and one feed-forward"),
    "feed_forward.has_bias": _NO_BIASES,
    **dict.fromkeys(("attention.has_qkv_bias", "attention.has_output_bias"), _NO_BIASES),
    "attention.qk_norm": "it does not normalise queries and keys",
    "attention.scalar": "it divides scores by the root of size_per_head",
    "attention.softcap": "it does not cap scores",
    "final_softcap": "it does not cap logits",
    "embedding_scale": "it does not scale embeddings",
}
"""What FasterTransformer has, by the field of a decoder."""
_FORMER_KEYS = (
    *("hidden_units", "rope_type", "layernorm_type", "has_zero_centred_norms", "activation_type", "is_gated"),
    *("has_qkv_bias", "has_dense_bias", "has_mlp_bias", "qk_norm", "has_output_norms", "embedding_scale"),
    *("attention_scalar", "attn_logit_softcap", "final_logit_softcap", "attention_window", "expert_num"),
)
"""With which earlier versions of Slipway wrote what no FasterTransformer computes."""


def words(decoder: Decoder) -> dict[str, Any]:
    """Return what a decoder is by the keys of ``config.ini``, in their order; ``of_words`` is the inverse."""
    attention, rotary = decoder.attention, decoder.layers[0].rotary or Rotary(decoder.size_per_head)
    return {
        "head_num": attention.head_num,
        "kv_head_num": attention.kv_head_num,
        "size_per_head": attention.size_per_head,
        "inter_size": decoder.feed_forward.inter_size,
        "num_layer": decoder.num_layer,
        "rotary_embedding": rotary.width,
        "layernorm_eps": decoder.norms.eps,
        "vocab_size": decoder.vocab_size,
        "rope_theta": rotary.base,
        "rope_scaling_factor": rotary.scaling.factor if isinstance(rotary.scaling, Linear) else 1.0,
        "max_pos_seq_len": decoder.max_positions,
        _UNTIED: not decoder.has_tied_head,
    }


def of_words(said: Mapping[str, Any]) -> Decoder:
    """Put a decoder together out of keys of ``config.ini``; those of ``_DEFAULTS`` may be missing."""
    given = {**_DEFAULTS, **said}
    factor = given["rope_scaling_factor"]
    rotary = Rotary(given["rotary_embedding"], given["rope_theta"], Linear(factor) if factor != 1 else None)
    fields = {
        **{f"attention.{key}": given[key] for key in ("head_num", "kv_head_num", "size_per_head")},
        "feed_forward.inter_size": given["inter_size"],
        "norms.eps": given["layernorm_eps"],
        "hidden_units": given["head_num"] * given["size_per_head"],
        "vocab_size": given["vocab_size"],
        "num_layer": given["num_layer"],
        "max_positions": given["max_pos_seq_len"],
        "has_tied_head": not given[_UNTIED],
        "layers.rotary": (rotary,) * given["num_layer"],
    }
    return models.with_names(Decoder.of(fields))


def beyond(decoder: Decoder) -> tuple[str, ...]:
    """List the fields of which FasterTransformer computes something else, one line each; empty: it computes the model.

    Whatever ``config.ini`` does not say is such a field, so that a new one is refused until it is said.
    """
    own, its = _without_idle(decoder), of_words(words(decoder)).fields()
    found = {name: value for name, value in own.fields().items() if name in its and value != its[name]}
    for block in {name.partition(".")[0] for name in own.fields().keys() - its.keys()}:
        found[block] = getattr(own, block)
    return tuple(
        f"{name} = {_shown(found[name])}  ({_REASONS.get(name, 'its config.ini has no key for it')})"
        for name in sorted(found)
    )


def _without_idle(decoder: Decoder) -> Decoder:
    """Leave out what changes nothing: the usual divisor of scores, and windows as long as the longest text."""
    attention, longest = decoder.attention, decoder.max_positions
    if attention.scalar == attention.size_per_head:
        attention = replace(attention, scalar=0.0)
    layers = (replace(each, window=0) if 0 < longest <= each.window else each for each in decoder.layers)
    return replace(decoder, attention=attention, layers=tuple(layers))


def _shown(value: Any) -> str:
    return ", ".join(dict.fromkeys(map(str, value))) if isinstance(value, tuple) else str(value)


def schema(decoder: Decoder) -> dict[str, TensorSpec]:
    """List every file of a model by name, without ``.<rank>.bin``."""
    vocabulary, norms = TensorSpec(("vocab_size", "hidden_units")), decoder.norms.tensors("final_norm")
    head = "embedding" if decoder.has_tied_head else "head"
    layer = _layer_files(decoder)
    return {
        EMBEDDING_FILE: replace(vocabulary, origin=decoder.name_of("embedding.weight")),
        **{_file_of(role): _own(tensor, decoder.name_of(role)) for role, tensor in norms.items()},
        HEAD_FILE: replace(vocabulary, origin=decoder.name_of(f"{head}.weight")),
        **{
            f"model.layers.{index}.{name}": _named(spec, index)
            for index in range(decoder.num_layer)
            for name, spec in layer.items()
        },
    }


def layer_files(decoder: Decoder, index: int) -> dict[str, str]:
    """Name a layer's files by the role of what they hold, without ``.weight`` and ``.bias``."""
    roles = dict.fromkeys(role.rpartition(".")[0] for role in decoder.layer())
    return {role: f"model.layers.{index}.{_FILES[role]}" for role in roles}


def _layer_files(decoder: Decoder) -> dict[str, TensorSpec]:
    """List the files of a layer; ``{layer}`` stands for its number in the names of the model's own tensors."""
    own = {role: _turned(tensor, decoder.name_of(role)) for role, tensor in decoder.layer().items()}
    found: dict[str, TensorSpec] = {}
    for role, spec in own.items():
        part, _, kind = role.rpartition(".")
        if part == _FUSED[0]:
            parts = tuple((each, own[f"{each}.{kind}"]) for each in _FUSED)
            shape = (*spec.shape[:-1], ("qkv_head_num", "size_per_head"))
            found[_file_of(role)] = TensorSpec(shape, len(shape) - 1, parts=parts)
        elif part not in _FUSED:
            found[_file_of(role)] = spec
    return found


def _file_of(role: str) -> str:
    part, _, kind = role.rpartition(".")
    return f"{FINAL_NORM if part == 'final_norm' else _FILES[part]}.{kind}"


def _turned(tensor: Tensor, origin: str) -> TensorSpec:
    """Turn a linear layer's weight around."""
    split = None if tensor.split_axis is None else len(tensor.axes) - 1 - tensor.split_axis
    return TensorSpec(tuple(reversed(tensor.axes)), split, origin=origin)


def _own(tensor: Tensor, origin: str = "") -> TensorSpec:
    return TensorSpec(tensor.axes, tensor.split_axis, origin=origin)


def _named(spec: TensorSpec, layer: int) -> TensorSpec:
    parts = tuple((word, _named(part, layer)) for word, part in spec.parts)
    return replace(spec, origin=spec.origin.format(layer=layer), parts=parts)


def own_tensors(decoder: Decoder) -> dict[str, TensorSpec]:
    """List the model's own tensors, as transformers names them."""
    tensors = decoder.tensors()
    specs = {tensor: _own(tensor) for tensor in set(tensors.values())}
    return {name: specs[tensor] for name, tensor in tensors.items()}


def config(values: ConfigValues) -> Sections:
    """List ``config.ini``: the keys of FasterTransformer's converters in their order, then ours where they are needed.

    It describes the files: where they are for more ranks than heads of keys and values, each rank has a copy of one.
    """
    of_files = values.dims.for_ranks(values.tensor_para_size)
    said = words(of_files)
    is_untied, copies = said.pop(_UNTIED), of_files.kv_head_num // values.dims.kv_head_num
    keys: dict[str, object] = {"model_name": SECTION}
    for key, value in said.items():
        keys[key] = value
        if key == "vocab_size":
            keys |= {"start_id": values.start_id, "end_id": values.end_id, "weight_data_type": values.data_type}
    keys["tensor_para_size"] = values.tensor_para_size
    keys |= {} if is_untied else {_UNTIED: 0}
    return {SECTION: keys if copies == 1 else {**keys, KV_COPIES: copies}}


def read(ini: ConfigIni, has: Callable[[str], bool], position_num: int | None = None) -> Decoder:
    """Read the dimensions that the files have; keys and defaults are those of LlamaTritonModel.cc.

    ``layernorm_eps`` is 1e-6 where an older converter has left it out.
    """
    section = ini[SECTION]
    # Of those keys one said nothing else than FasterTransformer computes: rope_type = linear.
    if former := [key for key in _FORMER_KEYS if section.texts.get(key, Linear.kind) != Linear.kind]:
        raise section.refusal(
            f"has {', '.join(former)}: an earlier version of Slipway wrote files of its own for what "
            "FasterTransformer's Llama does not compute",
            "convert the checkpoint again, with export.model.format=huggingface",
        )
    said: dict[str, Any] = {
        key: section.get(key, SIZE) for key in ("head_num", "size_per_head", "inter_size", "vocab_size")
    }
    heads, size = said["head_num"], said["size_per_head"]
    section.refuse("head_num", heads * size > LARGEST)
    kv_heads = said["kv_head_num"] = section.get("kv_head_num", SIZE, heads)
    section.refuse("kv_head_num", heads % kv_heads != 0)
    section.refuse(KV_COPIES, kv_heads % kv_copies(ini) != 0)
    said["num_layer"] = section.get("num_layer", LAYERS)
    width = said["rotary_embedding"] = section.get("rotary_embedding", INDEX)
    section.refuse("rotary_embedding", width % 2 == 1 or not 2 <= width <= size)
    said["max_pos_seq_len"] = section.get("max_pos_seq_len", INDEX, 0)
    said["layernorm_eps"] = section.get("layernorm_eps", fraction(), 1e-6)
    for key in ("rope_theta", "rope_scaling_factor"):
        said[key] = section.get(key, decimal, _DEFAULTS[key])
        section.refuse(key, said[key] <= 0)
    said[_UNTIED] = section.get(_UNTIED, FLAG, True)
    return of_words(said)


def kv_copies(ini: ConfigIni) -> int:
    """Read how many equal heads of keys and values follow one another in the files."""
    return ini[SECTION].get(KV_COPIES, COUNT, 1)


FAMILY = Family(
    name="llama",
    schema=schema,
    config=config,
    read=read,
    sections=(SECTION,),
    model_types=("Llama",),
    kv_heads="kv_head_num",
    uses_prefixes=True,
    own=own_tensors,
    defaults=_DEFAULTS,
    beyond=beyond,
    head_sizes=(32, 48, 64, 80, 96, 128, 144, 160, 192, 224, 256),
)
