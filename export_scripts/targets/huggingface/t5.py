"""FasterTransformer's T5 as transformers' T5. Names and shapes: ``models/t5/modeling_t5.py``."""

from __future__ import annotations

from typing import Any

from export_scripts.targets.huggingface.table import Facts, Taken, Target
from ft_format.families.t5 import HEAD_FILE, T5Dims

_ACTIVATIONS = {
    "gelu": "gelu_new",
    **dict.fromkeys(("gated-gelu", "geglu"), "gated-gelu"),  # in transformers the tanh form, as in FasterTransformer
    **dict.fromkeys(("gated-relu", "reglu"), "gated-relu"),
    **dict.fromkeys(("gated-silu", "SiGLU"), "gated-silu"),
}
_EMBEDDING = "shared.weight_T"


def _attention(name: str) -> dict[str, Taken]:
    return {f"{name}.{part}.weight": Taken(f"{name}.{part}.weight", order=(1, 2, 0), merged=(2, 1)) for part in "qkv"}


def _fused_attention(name: str) -> dict[str, Taken]:
    return {
        f"{name}.{part}.weight": Taken(
            f"{name}.qkv.weight", part=(1, index, index + 1), order=(1, 2, 3, 0), merged=(3, 1)
        )
        for index, part in enumerate("qkv")
    }


def _feed_forward(name: str, is_gated: bool) -> dict[str, Taken]:
    first, second = f"{name}.wi.weight", f"{name}.wi2.weight"
    inner = {f"{name}.wi_0.weight": first, f"{name}.wi_1.weight": second} if is_gated else {first: first}
    return {
        **{key: Taken(pivot, order=(1, 0)) for key, pivot in inner.items()},
        f"{name}.wo.weight": Taken(f"{name}.wo.weight", order=(1, 0)),
    }


def _side(side: str, layers: int, dims: T5Dims) -> dict[str, Taken]:
    relative = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    tensors = {relative: Taken(relative, order=(1, 0))}
    parts = 3 if side == "decoder" else 2
    for layer in range(layers):
        block = f"{side}.block.{layer}.layer."
        own = f"{block}0.SelfAttention"
        tensors |= _fused_attention(own) if side == "decoder" else _attention(own)
        attentions = [own]
        if side == "decoder":
            tensors |= _attention(f"{block}1.EncDecAttention")
            attentions.append(f"{block}1.EncDecAttention")
        for attention in attentions:
            tensors[f"{attention}.o.weight"] = Taken(f"{attention}.o.weight", order=(2, 0, 1), merged=(1, 2))
        tensors |= _feed_forward(f"{block}{parts - 1}.DenseReluDense", dims.is_gated)
        norms = [f"{block}{part}.layer_norm.weight" for part in range(parts)]
        tensors |= {name: Taken(name) for name in norms}
    last = f"{side}.final_layer_norm.weight"
    return {**tensors, last: Taken(last)}


def _tensors(dims: T5Dims, facts: Facts) -> dict[str, Taken]:
    return {
        "shared.weight": Taken(_EMBEDDING),
        **_side("encoder", dims.encoder_layer_num, dims),
        **_side("decoder", dims.decoder_layer_num, dims),
        **({} if dims.has_scaled_logits else {"lm_head.weight": Taken(HEAD_FILE)}),
    }


def _config(dims: T5Dims, facts: Facts) -> dict[str, Any]:
    """List the keys; ``tie_word_embeddings`` means in transformers too that logits are scaled."""
    return {
        "vocab_size": dims.vocab_size,
        "d_model": dims.d_model,
        "d_kv": dims.size_per_head,
        "d_ff": dims.inter_size,
        "num_layers": dims.encoder_layer_num,
        "num_decoder_layers": dims.decoder_layer_num,
        "num_heads": dims.head_num,
        "relative_attention_num_buckets": dims.position_num,
        "relative_attention_max_distance": dims.max_distance,
        "layer_norm_epsilon": dims.layernorm_eps,
        "feed_forward_proj": facts.activation or _ACTIVATIONS.get(dims.activation, dims.activation),
        "is_encoder_decoder": True,
        "tie_word_embeddings": dims.has_scaled_logits,
        "bos_token_id": None,
        "pad_token_id": facts.start_id if facts.pad_id is None else facts.pad_id,
        "decoder_start_token_id": facts.start_id,
    }


def _problems(dims: T5Dims, facts: Facts) -> list[str]:
    limits = {
        f"normalization: layernorm, with biases: {dims.has_bias}  (it has RMS norm and no biases)": dims.has_bias,
        "position_embedding_type: absolute  (it has relative positions)": not dims.has_relative_positions,
        f"ia3_num_tasks: {dims.ia3_num_tasks}  (it has no adapters)": dims.ia3_num_tasks > 0,
        f"adapter_inter_size: {dims.adapter_inter_size}  (it has no adapters)": dims.adapter_inter_size > 0,
        "lm_head.weight differs from the embedding, and logits are scaled  (it scales those of a tied head alone)": (
            dims.has_scaled_logits and not facts.is_head_tied
        ),
        "there is no decoder  (it generates)": not dims.has_decoder,
    }
    return [problem for problem, is_so in limits.items() if is_so]


def _dropped(dims: T5Dims, facts: Facts) -> dict[str, str]:
    return {HEAD_FILE: "the tied copy of the embedding"} if dims.has_scaled_logits else {}


T5 = Target("t5", "T5ForConditionalGeneration", _tensors, _config, _problems, _dropped)
