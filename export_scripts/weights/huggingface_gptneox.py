"""Hugging Face GPT-NeoX (and Pythia) as FasterTransformer's GPT-NeoX.

Keys: transformers, ``models/gpt_neox/modeling_gpt_neox.py``. Both rotate the halves of a head's first elements. Where
attention and feed-forward run side by side their biases become one, in FasterTransformer's file of the sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from export_scripts.weights.architecture import Architecture, Settings, in_layers
from export_scripts.weights.layouts import qkv_by_head_to_block, transposed, unchanged
from export_scripts.weights.schema import ModelDims, Rule, SourceMap
from export_scripts.weights.values import checkpoint_errors
from ft_format.families import gptneox
from models.blocks.rotary import rope_key, rope_parameters, rotated_part
from models.checks import shown

_PART = "partial_rotary_factor"
_BIASES = ("attention.dense.bias", "mlp.dense_4h_to_h.bias")
_OF_ATTENTION = ("*.attention.query_key_value.bias", "*.attention.dense.bias")
_LAYER = {
    "input_layernorm.weight": Rule("input_layernorm.weight", unchanged),
    "input_layernorm.bias": Rule("input_layernorm.bias", unchanged),
    "attention.query_key_value.weight": Rule("attention.query_key_value.weight", qkv_by_head_to_block),
    "attention.query_key_value.bias": Rule("attention.query_key_value.bias", qkv_by_head_to_block),
    "attention.dense.weight": Rule("attention.dense.weight", transposed),
    "post_attention_layernorm.weight": Rule("post_attention_layernorm.weight", unchanged),
    "post_attention_layernorm.bias": Rule("post_attention_layernorm.bias", unchanged),
    "mlp.dense_h_to_4h.weight": Rule("mlp.dense_h_to_4h.weight", transposed),
    "mlp.dense_h_to_4h.bias": Rule("mlp.dense_h_to_4h.bias", unchanged),
    "mlp.dense_4h_to_h.weight": Rule("mlp.dense_4h_to_h.weight", transposed),
}
_SEPARATE_BIASES = {name: Rule(name, unchanged) for name in _BIASES}
_SUM = Rule("mlp.attention.bias.sum", unchanged)
_TABLE = SourceMap(
    name="Hugging Face GPT-NeoX",
    rules={
        "embed_in.weight": Rule("model.wte", unchanged),
        "final_layer_norm.weight": Rule("model.final_layernorm.weight", unchanged),
        "final_layer_norm.bias": Rule("model.final_layernorm.bias", unchanged),
        "embed_out.weight": Rule("model.lm_head.weight", unchanged),
        **in_layers("layers.{layer}.", _LAYER),
    },
    ignored={
        "layers.*.attention.bias": "the causal mask",
        "layers.*.attention.masked_bias": "the value that masks",
        "layers.*.attention.rotary_emb.inv_freq": "frequencies, which are computed",
    },
)


def _with_biases(table: SourceMap, settings: Settings) -> SourceMap:
    """Sum the biases of layers whose halves run side by side."""
    if not settings.get("use_parallel_residual", True):
        biases = in_layers("layers.{layer}.", _SEPARATE_BIASES)
    else:
        keys = _BIASES if settings.get("attention_bias", True) else _BIASES[1]
        biases = in_layers("layers.{layer}.", {keys: _SUM})
    return replace(table, rules={**table.rules, **biases})


def _rope(settings: Settings) -> dict[str, Any]:
    with checkpoint_errors():
        rope = rope_parameters(Settings({"rotary_pct": 0.25, **settings}), "rotary_emb_base", "rotary_pct")
        return {**rope, _PART: rotated_part(rope)}


def _problems(settings: Settings) -> list[str]:
    """List what is not the plain rotation by position that FasterTransformer has, one line each."""
    rope, key = _rope(settings), rope_key(settings)
    reason = "it rotates with a base of 10000, without scaling"
    found = []
    if rope["rope_type"] != "default":
        whole = key == "rope_scaling"
        found.append(
            f"{key}: {shown(str(settings[key]))}" if whole else f"{key}: rope_type: {shown(rope['rope_type'])}"
        )
    bases = {"rotary_emb_base": settings.get("rotary_emb_base", 10000), "rope_theta": rope["rope_theta"]}
    bases["rope_theta"] = settings.get("rope_theta", bases["rope_theta"])  # which counts in transformers 4 alone
    found += [f"{name}: {shown(base)}" for name, base in bases.items() if base != 10000]
    found = [f"{each}  ({reason})" for each in found]
    part = settings.get(_PART, rope[_PART])
    if part != rope[_PART]:
        found.append(f"{_PART}: {shown(part)}  (transformers 5 rotates {rope[_PART]:g} of a head)")
    size = settings.head_size("hidden_size", "num_attention_heads")
    if settings.get("head_dim") not in (None, size):
        found.append(f"head_dim: {shown(settings['head_dim'])}  (its heads have {size} elements)")
    return found


def _dims(settings: Settings) -> ModelDims:
    size_per_head = settings.head_size("hidden_size", "num_attention_heads")
    return ModelDims(
        head_num=settings.size("num_attention_heads"),
        size_per_head=size_per_head,
        inter_size=settings.size("intermediate_size"),
        num_layer=settings.size("num_hidden_layers"),
        max_pos_seq_len=settings.size("max_position_embeddings", default=2048),
        vocab_size=settings.size("vocab_size"),
        layernorm_eps=settings.epsilon("layer_norm_eps"),
        rotary_embedding=int(size_per_head * _rope(settings)[_PART]),
        use_gptj_residual=bool(settings.get("use_parallel_residual", True)),
    )


GPTNEOX = Architecture(
    model_type="gpt_neox",
    family=gptneox.FAMILY,
    source_map=_TABLE,
    adapt=_with_biases,
    dims=_dims,
    prefix="gpt_neox.",
    embedding="embed_in.weight",
    head="embed_out.weight",
    other_names={"lm_head.weight": "embed_out.weight"},
    has_tied_head=False,
    activation=("hidden_act", "gelu"),
    more_problems=_problems,
    without_biases=lambda settings: () if settings.get("attention_bias", True) else _OF_ATTENTION,
    family_eps=1e-5,
)
