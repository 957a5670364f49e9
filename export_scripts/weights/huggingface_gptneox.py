"""Hugging Face GPT-NeoX (and Pythia) and FasterTransformer's GPT-NeoX, NeMo's GPT with rotation among its models.

Names and keys: transformers, ``models/gpt_neox/modeling_gpt_neox.py``. Both rotate the halves of a head's first
elements. Where attention and feed-forward run side by side FasterTransformer has one bias for both, their sum: it
becomes that of the feed-forward, and that of attention is zeros.
"""

from __future__ import annotations

from typing import Any

from export_scripts.weights.architecture import Architecture
from export_scripts.weights.hub_keys import Facts, Keys, activation, is_tied
from export_scripts.weights.hub_tensor import TURNED, HubTensor, both, in_layers, qkv_by_head
from export_scripts.weights.settings import Settings
from export_scripts.weights.values import checkpoint_errors
from ft_format.families import gptneox
from ft_format.families.gpt import HEAD_FILE, GptDims
from models.blocks.rotary import rope_key, rope_parameters, rotated_part
from models.checks import shown

_PART = "partial_rotary_factor"
_BIAS_SUM = "mlp.attention.bias.sum"
_LAYER = {
    **both("input_layernorm", "input_layernorm"),
    **qkv_by_head("attention.query_key_value", "attention.query_key_value"),
    "attention.dense.weight": HubTensor("attention.dense.weight", order=TURNED),
    **both("post_attention_layernorm", "post_attention_layernorm"),
    **both("mlp.dense_h_to_4h", "mlp.dense_h_to_4h", TURNED),
    "mlp.dense_4h_to_h.weight": HubTensor("mlp.dense_4h_to_h.weight", order=TURNED),
}
_SERIAL = {name: HubTensor(name) for name in ("attention.dense.bias", "mlp.dense_4h_to_h.bias")}
_PARALLEL = {
    "attention.dense.bias": HubTensor(_BIAS_SUM, is_zeros=True),
    "mlp.dense_4h_to_h.bias": HubTensor(_BIAS_SUM),
}


def _tensors(dims: GptDims) -> dict[str, HubTensor]:
    return {
        "gpt_neox.embed_in.weight": HubTensor("model.wte"),
        **in_layers("gpt_neox.layers.{layer}.", {**_LAYER, **(_PARALLEL if dims.use_gptj_residual else _SERIAL)}),
        **both("gpt_neox.final_layer_norm", "model.final_layernorm"),
        "embed_out.weight": HubTensor(HEAD_FILE),
    }


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


def _more_dims(settings: Settings) -> dict[str, Any]:
    return {
        "rotary_embedding": int(settings.head_size("hidden_size", "num_attention_heads") * _rope(settings)[_PART]),
        "use_gptj_residual": bool(settings.get("use_parallel_residual", True)),
    }


def _unlike(dims: GptDims, facts: Facts) -> list[str]:
    """The rotated width is a fraction in transformers' configuration, which must come to the same number again."""
    if int(dims.size_per_head * _rotary_pct(dims, facts)) == dims.rotary_embedding:
        return []
    return [f"rotary_embedding: {dims.rotary_embedding}  (no rotary_pct of {dims.size_per_head} comes to it)"]


def _rotary_pct(dims: GptDims, facts: Facts) -> float:
    return dims.rotary_embedding / dims.size_per_head


GPTNEOX = Architecture(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    title="GPT-NeoX",
    family=gptneox.FAMILY,
    tensors=_tensors,
    ignored={
        "layers.*.attention.bias": "the causal mask",
        "layers.*.attention.masked_bias": "the value that masks",
        "layers.*.attention.rotary_emb.inv_freq": "frequencies, which are computed",
    },
    keys=Keys(
        {
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_units",
            "num_hidden_layers": "num_layer",
            "num_attention_heads": "head_num",
            "intermediate_size": "inter_size",
            "hidden_act": activation,
            "max_position_embeddings": "max_pos_seq_len",
            "layer_norm_eps": "layernorm_eps",
            "rotary_pct": _rotary_pct,
            "rotary_emb_base": 10000,
            "use_parallel_residual": lambda dims, facts: dims.use_gptj_residual,
            "attention_bias": True,
            "tie_word_embeddings": is_tied,
        },
        {"max_pos_seq_len": 2048},
    ),
    more_dims=_more_dims,
    prefix="gpt_neox.",
    embedding="embed_in.weight",
    head="embed_out.weight",
    other_names={"lm_head.weight": "embed_out.weight"},
    has_tied_head=False,
    activation=("hidden_act", "gelu"),
    more_problems=_problems,
    without_biases=lambda settings: () if settings.get("attention_bias", True) else ("*.attention.*.bias",),
    family_eps=1e-5,
    unlike=_unlike,
)
