"""Llama and its relatives in the community's FasterTransformer layout: a dialect of the models in models/.

Layout and keys: FasterTransformer's Llama of void-main, LlamaWeight.cc, LlamaDecoderLayerWeight.cc and
LlamaTritonModel.cc; kv_head_num, rope_theta and rope_scaling_factor are those of its branches with grouped queries.
What these cannot express has keys and files of its own, which their loaders do not open: ``beyond_fastertransformer``
says when there are such.

Every matrix of a layer is the model's own, turned around. A rank's file of query, key and value holds the rank's
columns of each side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import models
from ft_format.config_ini import ConfigIni, Sections
from ft_format.families.family import LAYERS, SIZE, ConfigValues, Family
from ft_format.layout import Dims, TensorSpec
from ft_format.values import FLAG, INDEX, Values, decimal, fraction, one_of
from models.blocks.attention import BY_HEAD, NO_NORM
from models.blocks.feed_forward import ACTIVATIONS
from models.blocks.mixture import SPARSE_LAYER
from models.blocks.norms import LAYER_NORM, RMS_NORM
from models.blocks.rope_scaling import ORIGINAL, Linear, Llama3, Scaling
from models.blocks.rotary import DEFAULT, Rotary
from models.tensor import Tensor

SECTION = "llama"
EMBEDDING_FILE, HEAD_FILE, FINAL_NORM = "model.wte.weight", "model.lm_head.weight", "model.final_layernorm"
ALL_LAYERS = "1"
"""The ``attention_window_layers`` of a model whose every layer has the window."""
_FUSED = ("query", "key", "value")
_FILES = {
    **dict.fromkeys(_FUSED, "attention.query_key_value"),
    "input_norm": "input_layernorm",
    "pre_mlp_norm": "post_attention_layernorm",
    "post_attention_norm": "attention_output_layernorm",
    "mlp_output_norm": "mlp_output_layernorm",
    "query_norm": "attention.query_norm",
    "key_norm": "attention.key_norm",
    "attention_output": "attention.dense",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.router",
}
"""Files of a layer by the role of what they hold; an expert's are in ``mlp.experts.<n>``."""
_SCALINGS = (Linear, Llama3)
"""Those that keys of ``config.ini`` say."""
_HEAD_SIZES = (32, 48, 64, 80, 96, 128, 144, 160, 192, 224, 256)  # of FasterTransformer's grouped-query kernels


@dataclass(frozen=True)
class LlamaDims(models.Decoder, Dims):
    """A decoder as FasterTransformer's files have it.

    Attributes:
        kv_head_copies: how many equal heads of keys and values follow one another, in files for more ranks than heads.
    """

    kv_head_copies: int = 1

    def for_ranks(self, tensor_para_size: int) -> LlamaDims:
        """Copy heads of keys and values such that each rank has one, where there are more ranks than heads."""
        copies = max(1, tensor_para_size // self.kv_head_num)
        return self._with_heads(self.kv_head_num * copies, self.kv_head_copies * copies)

    def without_copies(self) -> LlamaDims:
        """Return the dimensions of the model itself."""
        return self._with_heads(self.kv_head_num // self.kv_head_copies, 1)

    def _with_heads(self, count: int, copies: int) -> LlamaDims:
        return replace(self, attention=replace(self.attention, kv_head_num=count), kv_head_copies=copies)

    @property
    def layernorm_eps(self) -> float:
        """Epsilon of every norm."""
        return self.norms.eps

    @property
    def max_pos_seq_len(self) -> int:
        """The longest text that it was trained for."""
        return self.max_positions

    @property
    def rotary_embedding(self) -> int:
        """Width of a head that is rotated by position."""
        return _rotary(self).width

    @property
    def has_untied_head(self) -> bool:
        """Whether the output projection is not the embedding; its file is there either way."""
        return not self.has_tied_head


def words(dims: LlamaDims) -> dict[str, Any]:
    """Return what a model is by the keys of ``config.ini``; ``of_words`` is the inverse."""
    attention, feed_forward, norms, rotary = dims.attention, dims.feed_forward, dims.norms, _rotary(dims)
    scaling, windows = rotary.scaling, [layer.window for layer in dims.layers]
    scaled = scaling.write() if isinstance(scaling, _SCALINGS) else {}
    return {
        "head_num": attention.head_num,
        "kv_head_num": attention.kv_head_num,
        "size_per_head": attention.size_per_head,
        "hidden_units": dims.hidden_units,
        "inter_size": feed_forward.inter_size,
        "num_layer": dims.num_layer,
        "vocab_size": dims.vocab_size,
        "max_pos_seq_len": dims.max_positions,
        "rotary_embedding": rotary.width,
        "layernorm_eps": norms.eps,
        "model_variant": dims.model_type,
        "has_untied_head": not dims.has_tied_head,
        "rope_theta": rotary.base,
        "rope_type": scaling.kind if scaling else DEFAULT,
        "rope_scaling_factor": scaled.get("factor", 1.0),
        "rope_low_freq_factor": scaled.get("low_freq_factor", 0.0),
        "rope_high_freq_factor": scaled.get("high_freq_factor", 0.0),
        "rope_original_max_position": scaled.get(ORIGINAL, 0),
        "layernorm_type": norms.kind,
        "has_zero_centred_norms": norms.is_zero_centred,
        "activation_type": feed_forward.activation,
        "is_gated": feed_forward.is_gated,
        "has_qkv_bias": attention.has_qkv_bias,
        "has_dense_bias": attention.has_output_bias,
        "has_mlp_bias": feed_forward.has_bias,
        "qk_norm": bool(attention.qk_norm),
        "has_output_norms": norms.is_after,
        "embedding_scale": dims.embedding_scale,
        "attention_scalar": attention.scalar,
        "attn_logit_softcap": attention.softcap,
        "final_logit_softcap": dims.final_softcap,
        "attention_window": max(windows),
        "attention_window_layers": _shortest([window > 0 for window in windows]) if max(windows) else ALL_LAYERS,
        "expert_num": dims.expert_num,
        "experts_per_token": dims.mixture.experts_per_token if dims.mixture else 0,
        "kv_head_copies": dims.kv_head_copies,
    }


_DEFAULTS: Mapping[str, Any] = {
    **{"model_variant": "", "has_untied_head": True, "rope_theta": 10000.0, "rope_type": DEFAULT},
    **{"rope_scaling_factor": 1.0, "rope_low_freq_factor": 0.0, "rope_high_freq_factor": 0.0},
    **{"rope_original_max_position": 0, "layernorm_type": RMS_NORM, "has_zero_centred_norms": False},
    **{"activation_type": "silu", "is_gated": True, "has_qkv_bias": False, "has_dense_bias": False},
    **{"has_mlp_bias": False, "qk_norm": False, "has_output_norms": False, "embedding_scale": 1.0},
    **{"attention_scalar": 0.0, "attn_logit_softcap": 0.0, "final_logit_softcap": 0.0, "attention_window": 0},
    **{"attention_window_layers": ALL_LAYERS, "expert_num": 0, "experts_per_token": 0, "kv_head_copies": 1},
}
"""Of keys that are written where the model is no plain Llama, in their order."""


def of_words(said: Mapping[str, Any]) -> LlamaDims:
    """Put a model together out of keys of ``config.ini``; those that a plain Llama does not need may be missing.

    A factor of positions without a type is FasterTransformer's forks', which know the factor alone: it is linear.
    """
    given = {**_DEFAULTS, **said}
    factor, rope_type = given["rope_scaling_factor"], given["rope_type"]
    scaling: Scaling | None = None
    if rope_type == Llama3.kind:
        waves = (given[f"rope_{name}"] for name in ("low_freq_factor", "high_freq_factor", "original_max_position"))
        scaling = Llama3(factor, *waves)
    elif rope_type == Linear.kind or factor != 1:
        scaling = Linear(factor)
    layers, window = range(given["num_layer"]), given["attention_window_layers"]
    fields = {
        **{f"attention.{key}": given[key] for key in ("head_num", "kv_head_num", "size_per_head", "has_qkv_bias")},
        "attention.has_output_bias": given["has_dense_bias"],
        "attention.qk_norm": BY_HEAD if given["qk_norm"] else NO_NORM,
        "attention.scalar": given["attention_scalar"],
        "attention.softcap": given["attn_logit_softcap"],
        **{f"feed_forward.{key}": given[key] for key in ("inter_size", "is_gated")},
        "feed_forward.activation": given["activation_type"],
        "feed_forward.has_bias": given["has_mlp_bias"],
        "norms.eps": given["layernorm_eps"],
        "norms.kind": given["layernorm_type"],
        "norms.is_zero_centred": given["has_zero_centred_norms"],
        "norms.is_after": given["has_output_norms"],
        **{key: given[key] for key in ("hidden_units", "vocab_size", "num_layer", "embedding_scale")},
        "max_positions": given["max_pos_seq_len"],
        "final_softcap": given["final_logit_softcap"],
        "has_tied_head": not given["has_untied_head"],
        "model_type": given["model_variant"],
        "layers.rotary": (Rotary(given["rotary_embedding"], given["rope_theta"], scaling),) * len(layers),
        "layers.window": tuple(given["attention_window"] * (window[n % len(window)] == "1") for n in layers),
    }
    if given["expert_num"]:
        fields |= {f"mixture.{key}": given[key] for key in ("expert_num", "experts_per_token", "inter_size")}
        fields["layers.blocks"] = (SPARSE_LAYER,) * len(layers)
    return models.with_names(LlamaDims.of(fields, kv_head_copies=given["kv_head_copies"]))


def _rotary(dims: LlamaDims) -> Rotary:
    """Return the rotation of the first layer that has one."""
    return next((layer.rotary for layer in dims.layers if layer.rotary), Rotary(0))


def _shortest(layers: list[bool]) -> str:
    """Write which layers have something as 1 and 0, as few of them as are repeated to the last layer."""
    flags = "".join("1" if each else "0" for each in layers)
    return next(flags[:n] for n in range(1, len(flags) + 1) if (flags[:n] * len(flags))[: len(flags)] == flags)


def unsaid(dims: LlamaDims) -> tuple[str, ...]:
    """List what no key of ``config.ini`` says, one line each: what is not read again as it was written."""
    kinds: dict[str, set[Any]] = {
        name: {getattr(layer, name) for layer in dims.layers} for name in ("rotary", "window")
    }
    found = [f"{name} of layers: {len(each - {0})} kinds" for name, each in kinds.items() if len(each - {0}) > 1]
    if not found and isinstance(scaling := _rotary(dims).scaling, Scaling) and not isinstance(scaling, _SCALINGS):
        found.append(f"rotary: {scaling.kind}")
    own, read_again = dims.fields(), {} if found else of_words(words(dims)).fields()
    found += [f"{name}: {own[name]}" for name in read_again if own[name] != read_again[name]]
    return tuple(f"{each}  (config.ini has no key for it)" for each in found)


def schema(dims: LlamaDims) -> dict[str, TensorSpec]:
    """List every file of a model by name, without ``.<rank>.bin``."""
    vocabulary, norms = TensorSpec(("vocab_size", "hidden_units")), dims.norms.tensors("final_norm")
    head = "embedding" if dims.has_tied_head else "head"
    layer = _layer_files(dims)
    return {
        EMBEDDING_FILE: replace(vocabulary, origin=dims.name_of("embedding.weight")),
        **{_file_of(role): _own(tensor, dims.name_of(role)) for role, tensor in norms.items()},
        HEAD_FILE: replace(vocabulary, origin=dims.name_of(f"{head}.weight")),
        **{
            f"model.layers.{index}.{name}": _named(spec, index)
            for index in range(dims.num_layer)
            for name, spec in layer.items()
        },
    }


def layer_files(dims: LlamaDims, index: int) -> dict[str, str]:
    """Name a layer's files by the role of what they hold, without ``.weight`` and ``.bias``."""
    roles = dict.fromkeys(role.rpartition(".")[0] for role in dims.layer())
    return {role: f"model.layers.{index}.{_file_of(f'{role}.').removesuffix('.')}" for role in roles}


def _layer_files(dims: LlamaDims) -> dict[str, TensorSpec]:
    """List the files of a layer; ``{layer}`` stands for its number in the names of the model's own tensors."""
    own = {role: _turned(tensor, dims.name_of(role)) for role, tensor in dims.layer().items()}
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
    if part == "final_norm":
        return f"{FINAL_NORM}.{kind}"
    if part.startswith("experts."):
        _, number, inner = part.split(".")
        return f"mlp.experts.{number}.{inner}_proj.{kind}"
    return f"{_FILES[part]}.{kind}"


def _turned(tensor: Tensor, origin: str) -> TensorSpec:
    """Turn a linear layer's weight around."""
    split = None if tensor.split_axis is None else len(tensor.axes) - 1 - tensor.split_axis
    return TensorSpec(tuple(reversed(tensor.axes)), split, origin=origin)


def _own(tensor: Tensor, origin: str = "") -> TensorSpec:
    return TensorSpec(tensor.axes, tensor.split_axis, origin=origin)


def _named(spec: TensorSpec, layer: int) -> TensorSpec:
    parts = tuple((word, _named(part, layer)) for word, part in spec.parts)
    return replace(spec, origin=spec.origin.format(layer=layer), parts=parts)


def own_tensors(dims: LlamaDims) -> dict[str, TensorSpec]:
    """List the model's own tensors, as transformers names them."""
    return {name: _own(tensor) for name, tensor in dims.tensors().items()}


_SIZES = ("head_num", "kv_head_num", "size_per_head", "inter_size", "num_layer", "rotary_embedding")
_KINDS: dict[type, Callable[[str], Any]] = {int: INDEX, float: decimal, bool: FLAG, str: str}
_OWN_KINDS: dict[str, Callable[[str], Any]] = {
    "rope_type": one_of({name: name for name in (DEFAULT, *(each.kind for each in _SCALINGS))}),
    "layernorm_type": one_of({name: name for name in (RMS_NORM, LAYER_NORM)}),
    "activation_type": one_of({name: name for name in ACTIVATIONS}),
}
# Keys that FasterTransformer's converters always write; the others are written where the model is no plain Llama.
_USUAL = ("rope_theta", "rope_scaling_factor")


def config(values: ConfigValues) -> Sections:
    """List ``config.ini``: the keys of FasterTransformer's converters in their order, then those of ours."""
    dims: LlamaDims = values.dims
    said = words(dims)
    own = {key: said[key] for key, default in _DEFAULTS.items() if said[key] != default}
    if dims.hidden_units != dims.head_num * dims.size_per_head:
        own["hidden_units"] = dims.hidden_units
    if dims.kv_head_copies > 1:  # last, as where shards are cut again
        own["kv_head_copies"] = own.pop("kv_head_copies")
    return {
        SECTION: {
            "model_name": SECTION,
            **{key: said[key] for key in (*_SIZES, "layernorm_eps", "vocab_size")},
            "start_id": values.start_id,
            "end_id": values.end_id,
            "weight_data_type": values.data_type,
            **{key: said[key] for key in (*_USUAL, "max_pos_seq_len")},
            "tensor_para_size": values.tensor_para_size,
            **{key: int(value) if isinstance(value, bool) else value for key, value in own.items()},
        }
    }


def read(ini: ConfigIni, has: Callable[[str], bool], position_num: int | None = None) -> LlamaDims:
    """Read the dimensions; keys and defaults are those of LlamaTritonModel.cc.

    ``layernorm_eps`` is 1e-6 where an older converter has left it out.
    """
    section = ini[SECTION]
    said: dict[str, Any] = {
        key: section.get(key, SIZE) for key in ("head_num", "size_per_head", "inter_size", "vocab_size")
    }
    said["kv_head_num"] = section.get("kv_head_num", SIZE, said["head_num"])
    section.refuse("kv_head_num", said["head_num"] % said["kv_head_num"] != 0)
    said["num_layer"] = section.get("num_layer", LAYERS)
    said["hidden_units"] = section.get("hidden_units", SIZE, said["head_num"] * said["size_per_head"])
    width = said["rotary_embedding"] = section.get("rotary_embedding", INDEX)
    section.refuse("rotary_embedding", width % 2 == 1 or not 2 <= width <= said["size_per_head"])
    said["max_pos_seq_len"] = section.get("max_pos_seq_len", INDEX, 0)
    said["layernorm_eps"] = section.get("layernorm_eps", fraction(), 1e-6)
    own = {key: section.find(key, _OWN_KINDS.get(key) or _KINDS[type(value)]) for key, value in _DEFAULTS.items()}
    said |= {key: value for key, value in own.items() if value is not None}
    _check_own(section, {**_DEFAULTS, **said})
    return of_words(said)


def _check_own(section: Values, said: Mapping[str, Any]) -> None:
    """Refuse values that no model can have, with the error class of whoever reads the file."""
    layers, copies = said["attention_window_layers"], said["kv_head_copies"]
    section.refuse("kv_head_copies", copies < 1 or said["kv_head_num"] % max(1, copies) != 0)
    section.refuse("attention_window_layers", not layers or set(layers) - set("01") != set())
    for key in ("rope_theta", "rope_scaling_factor", "embedding_scale"):
        section.refuse(key, key in section and said[key] <= 0)


def beyond_fastertransformer(dims: LlamaDims) -> tuple[str, ...]:
    """List what the community's FasterTransformer computes otherwise, one line each; empty: it computes the model.

    It is that of the branches with grouped queries; what reads neither kv_head_num nor rope_theta computes less.
    """
    said = words(dims)
    width, size, window = said["head_num"] * said["size_per_head"], said["size_per_head"], said["attention_window"]
    legal: dict[str, tuple[bool, str]] = {
        "hidden_units": (said["hidden_units"] == width, "its width is head_num * size_per_head"),
        "size_per_head": (size in _HEAD_SIZES, f"its kernels have {_HEAD_SIZES}"),
        "rope_type": (said["rope_type"] in (DEFAULT, Linear.kind), "it divides all positions by one factor"),
        "layernorm_type": (said["layernorm_type"] == RMS_NORM, "it has RMS norm without a bias"),
        "has_zero_centred_norms": (not said["has_zero_centred_norms"], "it multiplies by the weights as they are"),
        "activation_type": (said["activation_type"] == "silu", "it has SiLU"),
        "is_gated": (said["is_gated"], "its feed-forward has a gate"),
        **{key: (not said[key], "it has no biases") for key in ("has_qkv_bias", "has_dense_bias", "has_mlp_bias")},
        "qk_norm": (not said["qk_norm"], "it does not normalise queries and keys"),
        "has_output_norms": (not said["has_output_norms"], "it has norms before attention and feed-forward alone"),
        "embedding_scale": (said["embedding_scale"] == 1, "it does not scale embeddings"),
        "attention_scalar": (said["attention_scalar"] in (0, size), "it divides scores by the root of size_per_head"),
        "attn_logit_softcap": (said["attn_logit_softcap"] == 0, "it does not cap scores"),
        "final_logit_softcap": (said["final_logit_softcap"] == 0, "it does not cap logits"),
        "attention_window": (not 0 < window < said["max_pos_seq_len"], "every token sees all before it"),
        "expert_num": (said["expert_num"] == 0, "its feed-forward is one"),
    }
    shown = {key: int(value) if isinstance(value, bool) else value for key, value in said.items()}
    return tuple(f"{key} = {shown[key]}  ({reason})" for key, (is_so, reason) in legal.items() if not is_so)


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
    beyond=beyond_fastertransformer,
)
