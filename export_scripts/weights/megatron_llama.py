"""Llama and its relatives of Megatron-LM and NeMo as the Llama family: the spellings of GPT's keys, and a few more.

Keys: NeMo 1.23, ``megatron/mlp.py`` (legacy: one matrix for gate and up where the activation is "fast-", else two) and
megatron-core, ``gpt_layer_specs.py``, ``mlp.py`` (``apply_swiglu_sharded_factory``), ``moe/experts.py``; Gemma 2's
norms behind the linear layers: NeMo, ``gemma2_modules.py``. Norms stay as they are stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from export_scripts.tensors.dtypes import Array
from export_scripts.weights.layouts import transposed, unchanged
from export_scripts.weights.llama_layouts import (
    attention_output,
    half,
    key_of_groups,
    query_of_groups,
    value_of_groups,
)
from export_scripts.weights.megatron_gpt import CORE, FULL_LAYER, LEGACY, TIED_COPIES, TIED_COPY, ignored
from export_scripts.weights.schema import Layout, LlamaDims, Rule, Rules, SourceMap, Sources, split_layer
from ft_format.families import llama
from handover.errors import CheckpointError

_TARGET = "model.layers.{layer}."
_QKV = {"query": query_of_groups, "key": key_of_groups, "value": value_of_groups}
_QK_NORMS = {"q_layernorm": "query_norm", "k_layernorm": "key_norm"}
_OUTPUT_NORMS = {
    "self_attention.linear_proj.post_layernorm.": "attention_output_layernorm",
    "mlp.linear_fc2.post_layernorm.": "mlp_output_layernorm",
}
_WORDS = "embedding.word_embeddings.weight"
_ALL_EXPERTS = "mlp.experts.experts."


@dataclass(frozen=True)
class LlamaVariant:
    """What a checkpoint's configuration and its keys say about its tensors.

    Attributes:
        is_gated: the feed-forward has a gate.
        has_second_matrix: gate and up are two matrices; else they are one, the gate first.
        has_untied_head: the output projection is not a copy of the embedding.
        expert_num: feed-forwards of a layer; 0: there is one.
    """

    is_gated: bool = True
    has_second_matrix: bool = False
    has_untied_head: bool = True
    expert_num: int = 0


def table(prefix: str, keys: Collection[str], variant: LlamaVariant) -> SourceMap:
    """Choose the table by the keys.

    Args:
        prefix: what every key begins with; see ``megatron_gpt``.
        keys: of the checkpoint.
        variant: of the model.

    Raises:
        CheckpointError: the keys are none of a decoder.
    """
    legacy = f"{prefix}language_model."
    if any(key.startswith(legacy) for key in keys):
        rules = _outer(legacy, f"{legacy}output_layer.weight", variant)
        for stack in ("encoder", "transformer"):
            rules |= _norm(f"{legacy}{stack}.final_layernorm.", "model.final_layernorm")
            for spelling in (LEGACY, FULL_LAYER):
                rules |= _layers(f"{legacy}{stack}.layers.{{layer}}.", spelling, variant)
        dropped = {f"{prefix}{key}": reason for key, reason in TIED_COPIES.items()}
        name = "NeMo Llama with legacy keys" if prefix else "Megatron-LM Llama"
        copies = dict.fromkeys(dropped, f"{legacy}{_WORDS}")
        return SourceMap(name, rules, ignored(dropped, True), copies=copies)
    if not any(key.startswith((f"{prefix}decoder.layers.", f"{prefix}embedding.")) for key in keys):
        raise CheckpointError(f"it has no keys of a GPT ({', '.join(sorted(keys)[:3]) or 'it is empty'})")
    head = f"{prefix}output_layer.weight"
    rules = _outer(prefix, head, variant) | _norm(f"{prefix}decoder.final_layernorm.", "model.final_layernorm")
    base = f"{prefix}decoder.layers.{{layer}}."
    for spelling in (CORE, FULL_LAYER):
        rules |= _layers(base, spelling, variant)
    rules |= _core_alone(base, variant)
    dropped = {} if variant.has_untied_head else {head: TIED_COPY}
    copies = dict.fromkeys(dropped, f"{prefix}{_WORDS}")
    return SourceMap("megatron-core Llama", rules, ignored(dropped, True), copies=copies)


def has_second_matrix(keys: Iterable[str]) -> bool:
    """Whether gate and up are two matrices: NeMo's legacy "swiglu" and "geglu", or megatron-core's halves apart."""
    return any(key.endswith(("dense_h_to_4h_2.weight", "linear_fc1.weight_w")) for key in keys)


def has_output_norms(keys: Iterable[str]) -> bool:
    """Whether norms follow attention and feed-forward, as in Gemma 2."""
    return any("post_layernorm" in key for key in keys)


def has_key(keys: Iterable[str], *places: str) -> bool:
    """Whether there are keys of a layer that end so."""
    return any(split_layer(key)[0].endswith(places) for key in keys)


def _outer(base: str, head: str, variant: LlamaVariant) -> dict[Sources, Rules]:
    words, output = Rule(llama.EMBEDDING_FILE, unchanged, join_axis=0), Rule(llama.HEAD_FILE, unchanged, join_axis=0)
    return {
        f"{base}{_WORDS}": words if variant.has_untied_head else (words, output),
        head: output,
    }


def _norm(base: str, target: str) -> dict[Sources, Rules]:
    return {f"{base}{name}": Rule(f"{target}.{name}", unchanged) for name in ("weight", "bias")}


def _layers(base: str, spelling: Mapping[str, tuple[str, ...]], variant: LlamaVariant) -> dict[Sources, Rules]:
    rules: dict[Sources, Rules] = {}
    for part, places in spelling.items():
        for place in places:
            if part.endswith("layernorm"):
                rules |= _norm(base + place, _TARGET + part)
            else:
                rules |= _linear(base + place, part, variant)
    return rules


def _linear(base: str, part: str, variant: LlamaVariant) -> dict[Sources, Rules]:
    """Give the rules of a linear layer: its weight, and its bias if it has one."""
    if part == "attention.query_key_value":
        return {
            f"{base}{name}": tuple(Rule(f"{_TARGET}attention.{to}.{name}", by, 0) for to, by in _QKV.items())
            for name in ("weight", "bias")
        }
    if part == "attention.dense":
        return {
            f"{base}weight": Rule(f"{_TARGET}attention.dense.weight", attention_output, 1),
            f"{base}bias": Rule(f"{_TARGET}attention.dense.bias", unchanged),
        }
    if part == "mlp.dense_4h_to_h":
        return {
            f"{base}weight": Rule(f"{_TARGET}mlp.down_proj.weight", transposed, 1),
            f"{base}bias": Rule(f"{_TARGET}mlp.down_proj.bias", unchanged),
        }
    return _inner(base, f"{_TARGET}mlp.", variant)


def _inner(base: str, target: str, variant: LlamaVariant) -> dict[Sources, Rules]:
    """Give the rules of the feed-forward's first layer: up alone, gate and up in one, or each in its own."""
    layouts: dict[str, Layout] = {"weight": transposed, "bias": unchanged}
    if not variant.is_gated:
        return {f"{base}{name}": Rule(f"{target}up_proj.{name}", layout, 0) for name, layout in layouts.items()}
    if not variant.has_second_matrix:
        return {f"{base}{name}": _gate_and_up(target, name) for name in layouts}
    rules: dict[Sources, Rules] = {}
    second = base.removesuffix(".") + "_2."
    for name, layout in layouts.items():
        gate = Rule(f"{target}gate_proj.{name}", layout, 0)
        up = Rule(f"{target}up_proj.{name}", layout, 0)
        rules |= {f"{base}{name}": gate, f"{second}{name}": up, f"{base}{name}_w": gate, f"{base}{name}_v": up}
    return rules


def _gate_and_up(target: str, name: str) -> tuple[Rule, ...]:
    return tuple(Rule(f"{target}{to}.{name}", half(index), 0) for index, to in enumerate(("gate_proj", "up_proj")))


def _core_alone(base: str, variant: LlamaVariant) -> dict[Sources, Rules]:
    """Give the rules of what only megatron-core has."""
    rules: dict[Sources, Rules] = {}
    for place, target in _QK_NORMS.items():
        rules |= _norm(f"{base}self_attention.{place}.", f"{_TARGET}attention.{target}")
    for place, target in _OUTPUT_NORMS.items():
        rules |= _norm(base + place, _TARGET + target)
    if variant.expert_num:
        rules |= {f"{base}mlp.router.weight": Rule(f"{_TARGET}mlp.router.weight", transposed)}
        rules |= _experts(base, variant)
    return rules


def _experts(base: str, variant: LlamaVariant) -> dict[Sources, Rules]:
    """Give the rules of a mixture.

    Rank files hold tensors of each expert, distributed checkpoints arrays of all of them, or, with
    ``singleton_local_shards``, arrays of each. Which training rank had an expert does not show in their names.
    """
    rules: dict[Sources, Rules] = {}
    of_all: dict[str, list[Rule]] = {}
    for number in range(variant.expert_num):
        target = f"{_TARGET}mlp.experts.{number}."
        for place in (f"{base}{_ALL_EXPERTS}{number}.", f"{base}mlp.experts.local_experts.{number}."):
            inner = _inner(f"{place}linear_fc1.", target, variant)
            rules |= {**inner, f"{place}linear_fc2.weight": Rule(f"{target}down_proj.weight", transposed, 1)}
        for key, rule in inner.items():
            for each in rule if isinstance(rule, tuple) else (rule,):
                of_all.setdefault(str(key).rpartition(".linear_fc1.")[2], []).append(_of_expert(number, each))
        rules_of_output = Rule(f"{target}down_proj.weight", transposed)
        of_all.setdefault("", []).append(_of_expert(number, rules_of_output))
    for name, each_of in of_all.items():
        place = f"linear_fc1.{name}" if name else "linear_fc2.weight"
        rules[f"{base}{_ALL_EXPERTS}{place}"] = tuple(each_of)
    return rules


def _of_expert(number: int, rule: Rule) -> Rule:
    def taken(values: Array, dims: LlamaDims) -> Array:
        return rule.layout(values[number], dims)

    return Rule(rule.target, taken)
