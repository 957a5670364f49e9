"""Llama and its relatives of Megatron-LM and NeMo: the spellings of models/ as a table. Norms stay as they are stored.

Keys: NeMo 1.23, ``megatron/mlp.py`` (legacy: one matrix for gate and up where the activation is "fast-", else two) and
megatron-core, ``gpt_layer_specs.py``, ``mlp.py`` (``apply_swiglu_sharded_factory``), ``moe/experts.py``; Gemma 2's
norms behind the linear layers: NeMo, ``gemma2_modules.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from export_scripts.tensors.dtypes import Array
from export_scripts.weights.layouts import plus_one, unchanged
from export_scripts.weights.megatron_gpt import TIED_COPIES, TIED_COPY, ignored
from export_scripts.weights.schema import Layout, Rule, Rules, SourceMap, Sources, as_tuple, split_layer
from handover.errors import CheckpointError
from models.blocks import norms, predictor
from models.blocks.expert_arrays import Gathered
from models.decoder import Decoder
from models.spelling import Spelling
from models.tensor import Tensor

OF_TEXT = "language_model."
"""What keys of the text model begin with, where images are seen as well."""
OF_IMAGES = ("vision_model", "visual", "vision_tower", "multi_modal_projector")
"""What is beside it."""
LEFT_OUT = "predictors of further tokens, which are not written for this class of transformers"
_WORDS = "embedding.word_embeddings.weight"
_KINDS = ("weight", "bias")
_APART = re.compile(r"(?:dense_h_to_4h_2\.weight|linear_fc1\.weight\d*_w)$")
_DOWN, _FUSED_DOWN = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight"), "linear_qkv_down_proj.weight"
_UNKNOWN = Tensor(("hidden_units",))


def table(prefix: str, keys: Collection[str], dims: Decoder) -> SourceMap:
    """Choose the table by the keys.

    Args:
        prefix: what every key begins with; see ``megatron_gpt``.
        keys: of the checkpoint.
        dims: of the model; the vocabulary's may be unknown.

    Raises:
        CheckpointError: the keys are none of a decoder.
    """
    legacy = f"{prefix}language_model."
    if any(key.startswith(legacy) for key in keys):
        rules = _outer(legacy, f"{legacy}output_layer.weight", dims)
        for stack in ("encoder", "transformer"):
            rules |= _final_norm(f"{legacy}{stack}.", dims) | _layers(f"{legacy}{stack}.layers.{{layer}}.", keys, dims)
        dropped = {f"{prefix}{key}": reason for key, reason in TIED_COPIES.items()}
        name = "NeMo Llama with legacy keys" if prefix else "Megatron-LM Llama"
        copies = dict.fromkeys(dropped, f"{legacy}{_WORDS}")
        return SourceMap(name, rules, ignored(dropped, True), copies=copies)
    if not any(key.startswith((f"{prefix}decoder.layers.", f"{prefix}embedding.")) for key in keys):
        raise CheckpointError(f"it has no keys of a GPT ({', '.join(sorted(keys)[:3]) or 'it is empty'})")
    head = f"{prefix}output_layer.weight"
    rules = _outer(prefix, head, dims) | _final_norm(f"{prefix}decoder.", dims)
    rules |= _layers(f"{prefix}decoder.layers.{{layer}}.", keys, dims)
    for number in range(dims.predictor_num):
        rules |= _predictor(f"{prefix}mtp.layers.{number}.", keys, dims, number)
    rules = _with_cut_down(rules, keys) if dims.latent else rules
    dropped = {head: TIED_COPY} if dims.has_tied_head else {}
    of_images = dict.fromkeys((f"{name}.*" for name in OF_IMAGES), "of images") if prefix == OF_TEXT else {}
    copies = dict.fromkeys(dropped, f"{prefix}{_WORDS}")
    behind = {} if dims.predictor_num else {f"{prefix}mtp.*": LEFT_OUT}
    return SourceMap("megatron-core Llama", rules, ignored({**dropped, **of_images, **behind}, True), copies=copies)


def has_output_norms(keys: Iterable[str]) -> bool:
    """Whether norms follow attention and feed-forward, as in Gemma 2."""
    return any("post_layernorm" in key for key in keys)


def has_input_norms(keys: Collection[str]) -> bool:
    """Whether norms come before attention."""
    spelling = next(each for each in norms.SPELLINGS if each.roles == ("input_norm",))
    return has_key(keys, *(f".{name.format(kind='weight')}" for name in spelling.names))


def has_key(keys: Iterable[str], *places: str) -> bool:
    """Whether there are keys of a layer that end so."""
    return any(split_layer(key)[0].endswith(places) for key in keys)


def _outer(base: str, head: str, dims: Decoder) -> dict[Sources, Rules]:
    copies = {role: [role] for role in predictor.COPIES}
    if dims.has_tied_head:
        copies["embedding"].append("head")
    behind = range(dims.num_layer, dims.num_layer + dims.predictor_num)

    def rules(role: str) -> Rules:
        held = [each for each in map(predictor.COPIES.__getitem__, copies[role]) if dims.names[each.rpartition(".")[0]]]
        of_predictors = (dims.name_of(each, layer) for each in held for layer in behind)
        names = (dims.name_of(f"{role}.weight"), *of_predictors)
        return tuple(Rule(name, unchanged, join_axis=0) for name in names)

    return {f"{base}{_WORDS}": rules("embedding"), head: rules("head")}


def _final_norm(base: str, dims: Decoder) -> dict[Sources, Rules]:
    """Name the last norm as a GPT does, and as a hybrid does."""
    return {
        f"{base}{name}.{kind}": Rule(dims.name_of(f"final_norm.{kind}"), unchanged)
        for name in ("final_layernorm", "final_norm")
        for kind in _KINDS
    }


def _layers(base: str, keys: Collection[str], dims: Decoder, layer: int | str = "{layer}") -> dict[Sources, Rules]:
    """Write every spelling of a layer's tensors out, whether or not the model has them, as ``layer`` of the model."""
    is_apart = any(_APART.search(key) for key in keys)
    return _spelled(base, dims.spellings(is_apart), dims.roles, dims, layer)


def _with_cut_down(rules: dict[Sources, Rules], keys: Collection[str]) -> dict[Sources, Rules]:
    """Cut what leads down to narrow vectors by rows, as the local specification and ``mla_down_proj_fusion`` do.

    Transformer Engine's layers have all of it on each rank; its norms have other names than the local ones.
    """
    ends = (_FUSED_DOWN, *(_DOWN if has_key(keys, "self_attention.kv_layernorm.weight") else ()))
    return {
        sources: tuple(replace(rule, join_axis=0) for rule in as_tuple(rule))
        if isinstance(sources, str) and sources.endswith(ends)
        else rule
        for sources, rule in rules.items()
    }


def _predictor(base: str, keys: Collection[str], dims: Decoder, number: int) -> dict[Sources, Rules]:
    """Write the spellings of a predictor out: what is its own, and its layers.

    Disk and memory name a single layer differently; those of a hybrid are listed.
    """
    count = len(dims.predictor_blocks) or 1
    first = dims.num_layer + number * count
    *into, out_of = predictor.SPELLINGS
    rules = _spelled(base, into, predictor.TENSORS, dims, first)
    rules |= _spelled(base, (out_of,), predictor.TENSORS, dims, first + count - 1)
    places = {f"{predictor.LISTED}.{place}": first + place for place in range(len(dims.predictor_blocks))}
    for place, layer in (places or dict.fromkeys(predictor.LAYERS, first)).items():
        rules |= _layers(f"{base}{place}.", keys, dims, layer)
    return rules


def _spelled(
    base: str, spellings: Iterable[Spelling], tensors: Mapping[str, Tensor], dims: Decoder, layer: int | str
) -> dict[Sources, Rules]:
    rules: dict[Sources, Rules] = {}
    for spelling in spellings:
        if isinstance(spelling, Gathered):
            names = tuple(base + name for name in spelling.names)
            rules[names if len(names) > 1 else names[0]] = _gathered(spelling, tensors, dims, layer)
            continue
        for name in spelling.names:
            for kind in spelling.kinds:
                key = base + name.format(kind=kind)
                made = tuple(_rule(spelling, role, kind, tensors, dims, layer) for role in spelling.roles)
                if spelling.sections:
                    one = replace(made[0], concat_axis=spelling.section_axis)
                    rules[tuple(f"{key}.{section}" for section in spelling.sections)] = one
                else:
                    rules[key] = made
    return rules


def _rule(
    spelling: Spelling, role: str, kind: str, tensors: Mapping[str, Tensor], dims: Decoder, layer: int | str
) -> Rule:
    name = f"{role}.{kind}" if kind else role
    weight = tensors.get(f"{role}.weight", _UNKNOWN)  # of a bias that the model has not, the error names the shape
    tensor = tensors.get(name) or (weight.bias if kind == "bias" else weight)
    split_axis = None if spelling.is_stacked else tensor.split_axis  # no training rank's part of all experts is read
    lacks_one = spelling.is_centred and dims.norms.is_zero_centred
    layout, computed = _layout(spelling, role, tensor), plus_one if lacks_one else None
    return Rule(dims.name_of(name, layer), layout, split_axis, elementwise=computed)


def _gathered(spelling: Gathered, tensors: Mapping[str, Tensor], dims: Decoder, layer: int | str) -> Rule:
    role, axes = spelling.roles[0], (*spelling.axes, None, None)
    layout = _layout(spelling, role, tensors.get(role, _UNKNOWN))
    return Rule(dims.name_of(role, layer), layout, spelling.cut, concat_axis=axes[0], pair_axis=axes[1])


def _layout(spelling: Spelling, role: str, tensor: Tensor) -> Layout:
    def layout(values: Array, dims: Decoder) -> Array:
        shown: Array = spelling.read(values, role, tensor, dims.axis_size)
        return shown

    return layout
