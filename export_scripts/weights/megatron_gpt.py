"""The GPT of Megatron-LM and NeMo as FasterTransformer's GPT: one layout, three spellings of the keys.

Keys: NeMo 1.23, ``megatron/gpt_model.py`` and ``transformer.py`` (legacy); megatron-core, ``gpt_layer_specs.py`` (the
transformer-engine and the local specification); transformer-engine, ``TransformerLayer`` (its full layer).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from export_scripts.weights.layouts import plus_one, qkv_by_head_to_block, transposed, unchanged
from export_scripts.weights.schema import Layout, Rule, Rules, SourceMap, Sources


@dataclass(frozen=True)
class GptVariant:
    """What a checkpoint's configuration says about its tensors.

    Attributes:
        qkv: from the training's order of the fused query, key and value to FasterTransformer's.
        has_zero_centred_norms: layer norms store weight - 1 (LayerNorm1P).
        has_untied_head: the output projection is not a copy of the embedding.
        is_rotary: FasterTransformer's GPT-NeoX is the target, which has an output projection of its own.
    """

    qkv: Layout = qkv_by_head_to_block
    has_zero_centred_norms: bool = False
    has_untied_head: bool = False
    is_rotary: bool = False


_WORDS, _POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"

# Linear layers of a block: target, axis that training's tensor parallelism cuts in the weight and in the bias.
_LINEAR = {
    "attention.query_key_value": (0, 0),
    "attention.dense": (1, None),
    "mlp.dense_h_to_4h": (0, 0),
    "mlp.dense_4h_to_h": (1, None),
}
# Where a block's tensors lie, without "weight" or "bias", in each spelling. An attention called "attention" is that of
# Megatron-LM before 2021.
LEGACY = {
    "input_layernorm": ("input_layernorm.",),
    "attention.query_key_value": ("self_attention.query_key_value.", "attention.query_key_value."),
    "attention.dense": ("self_attention.dense.", "attention.dense."),
    "post_attention_layernorm": ("post_attention_layernorm.",),
    "mlp.dense_h_to_4h": ("mlp.dense_h_to_4h.",),
    "mlp.dense_4h_to_h": ("mlp.dense_4h_to_h.",),
}
FULL_LAYER = {
    "input_layernorm": ("self_attention.layernorm_qkv.layer_norm_",),
    "attention.query_key_value": ("self_attention.layernorm_qkv.",),
    "attention.dense": ("self_attention.proj.",),
    "post_attention_layernorm": ("layernorm_mlp.layer_norm_",),
    "mlp.dense_h_to_4h": ("layernorm_mlp.fc1_",),
    "mlp.dense_4h_to_h": ("layernorm_mlp.fc2_",),
}
CORE = {
    "input_layernorm": ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    "attention.query_key_value": ("self_attention.linear_qkv.",),
    "attention.dense": ("self_attention.linear_proj.",),
    "post_attention_layernorm": ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    "mlp.dense_h_to_4h": ("mlp.linear_fc1.",),
    "mlp.dense_4h_to_h": ("mlp.linear_fc2.",),
}

TIED_COPY = "the last pipeline stage's copy of the tied embedding"
TIED_COPIES = {"word_embeddings.weight": TIED_COPY, "word_embeddings_for_head.weight": TIED_COPY}
"""Legacy keys of the embedding's copies."""


# What lies beside the model in Megatron-LM's files and in distributed checkpoints.
_SCALING = "transformer-engine's FP8 scaling; None or bytes, no weights"
_OPTIMIZER, _LOOP, _RANDOM = "the optimizer's state", "the training loop's state", "the random generators' state"
_TRAINING = {
    **{name: _OPTIMIZER for name in ("optimizer", "optimizer.*", "chained_*", "opt_param_scheduler*", "lr_scheduler")},
    **{name: _OPTIMIZER for name in ("client_lr_scheduler", "loss_scaler", "overflow", "param_groups")},
    **{
        name: _LOOP for name in ("args", "checkpoint_version", "iteration", "total_iters", "tokens", "content_metadata")
    },
    **{name: _LOOP for name in ("rerun_state_machine*", "num_floating_point_operations_so_far", "mid_epoch_state")},
    "common_state/shard_*": _LOOP,
    **{name: _RANDOM for name in ("rng_state*", "*_rng_state", "rng_tracker_states")},
}


def legacy(prefix: str, variant: GptVariant) -> SourceMap:
    """The table of NeMo 1.x with ``mcore_gpt: false`` and of Megatron-LM before megatron-core.

    Args:
        prefix: what every key begins with: ``model.`` in NeMo, nothing in Megatron-LM.
        variant: of the model.
    """
    base = f"{prefix}language_model."
    rules = _outer(base, f"{base}output_layer.weight", variant)
    for stack in ("encoder", "transformer"):
        rules |= _norm(f"{base}{stack}.final_layernorm.", "model.final_layernorm", variant)
        for spelling in (LEGACY, FULL_LAYER):
            rules |= _layers(f"{base}{stack}.layers.{{layer}}.", spelling, variant)
    dropped = {f"{prefix}{key}": reason for key, reason in TIED_COPIES.items()}
    name = "NeMo GPT with legacy keys" if prefix else "Megatron-LM GPT"
    return SourceMap(name, rules, ignored(dropped, variant.is_rotary), copies=dict.fromkeys(dropped, f"{base}{_WORDS}"))


def megatron_core(prefix: str, variant: GptVariant) -> SourceMap:
    """The table of megatron-core, in NeMo 1.x with ``mcore_gpt: true``, NeMo 2.x and Megatron-LM.

    Args:
        prefix: what every key begins with: ``model.`` in NeMo 1.x, ``module.`` in NeMo 2.x, nothing in Megatron-LM.
        variant: of the model.
    """
    head = f"{prefix}output_layer.weight"
    rules = _outer(prefix, head, variant) | _norm(f"{prefix}decoder.final_layernorm.", "model.final_layernorm", variant)
    for spelling in (CORE, FULL_LAYER):
        rules |= _layers(f"{prefix}decoder.layers.{{layer}}.", spelling, variant)
    dropped = {} if variant.has_untied_head else {head: TIED_COPY}
    copies = dict.fromkeys(dropped, f"{prefix}{_WORDS}")
    return SourceMap("megatron-core GPT", rules, ignored(dropped, variant.is_rotary), copies=copies)


def is_legacy(keys: Iterable[str], prefix: str) -> bool:
    """Whether keys are those of ``legacy``."""
    return any(key.startswith(f"{prefix}language_model.") for key in keys)


def is_megatron_core(keys: Iterable[str], prefix: str) -> bool:
    """Whether keys are those of ``megatron_core``."""
    return any(key.startswith((f"{prefix}decoder.layers.", f"{prefix}embedding.")) for key in keys)


def _outer(base: str, head: str, variant: GptVariant) -> dict[Sources, Rules]:
    words = Rule("model.wte", unchanged, join_axis=0)
    tied = (words, Rule("model.lm_head.weight", unchanged, join_axis=0))
    return {
        f"{base}{_WORDS}": tied if variant.is_rotary and not variant.has_untied_head else words,
        f"{base}{_POSITIONS}": Rule("model.wpe", unchanged),
        head: Rule("model.lm_head.weight", unchanged, join_axis=0),
    }


def _norm(base: str, target: str, variant: GptVariant) -> dict[Sources, Rules]:
    weight = Rule(f"{target}.weight", unchanged, elementwise=plus_one if variant.has_zero_centred_norms else None)
    return {f"{base}weight": weight, f"{base}bias": Rule(f"{target}.bias", unchanged)}


def _layers(base: str, spelling: Mapping[str, tuple[str, ...]], variant: GptVariant) -> dict[Sources, Rules]:
    rules: dict[Sources, Rules] = {}
    for part, places in spelling.items():
        target = f"model.layers.{{layer}}.{part}"
        for place in places:
            if part not in _LINEAR:
                rules |= _norm(base + place, target, variant)
                continue
            is_qkv = part == "attention.query_key_value"
            weight_axis, bias_axis = _LINEAR[part]
            rules[f"{base}{place}weight"] = Rule(f"{target}.weight", variant.qkv if is_qkv else transposed, weight_axis)
            rules[f"{base}{place}bias"] = Rule(f"{target}.bias", variant.qkv if is_qkv else unchanged, bias_axis)
    return rules


def ignored(more: Mapping[str, str], is_rotary: bool) -> dict[str, str]:
    """List the keys that are dropped on purpose, with the reason: those of training, and ``more``."""
    return {
        **({"*rotary*.inv_freq": "computed from the configuration"} if is_rotary else {}),
        **{f"*._extra_state{place}": _SCALING for place in ("", "[0-9]*", "/shard_*")},
        **_TRAINING,
        **more,
    }
