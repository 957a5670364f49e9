"""Hugging Face's T5 and mT5 and FasterTransformer's T5.

Names: transformers, ``modeling_t5.py`` and ``modeling_mt5.py``. FasterTransformer's are those of transformers but for
the embedding, the decoder's fused q, k, v and the two halves of a gated feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.weights.hub_keys import Facts
from export_scripts.weights.hub_tensor import TURNED, HubTensor, in_every_layer, rules_of, thirds
from export_scripts.weights.layouts import unchanged
from export_scripts.weights.schema import Rule, Rules, SourceMap, Sources
from ft_format.families.t5 import FAMILY, HEAD_FILE, T5Dims

_ACTIVATIONS = {
    "gelu": "gelu_new",
    **dict.fromkeys(("gated-gelu", "geglu"), "gated-gelu"),  # in transformers the tanh form, as in FasterTransformer
    **dict.fromkeys(("gated-relu", "reglu"), "gated-relu"),
    **dict.fromkeys(("gated-silu", "SiGLU"), "gated-silu"),
}
SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "d_model",
    "d_kv": "size_per_head",
    "d_ff": "inter_size",
    "num_layers": "encoder_layer_num",
    "num_decoder_layers": "decoder_layer_num",
    "num_heads": "head_num",
    "relative_attention_num_buckets": "position_num",
}
"""Dimensions by their keys in ``config.json``."""
_EMBEDDING, _HEAD = "shared.weight", "lm_head.weight"
_IGNORED = {
    "encoder.embed_tokens.weight": "a copy of shared.weight",
    "decoder.embed_tokens.weight": "a copy of shared.weight",
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": "of the first T5 files; no model uses it",
}


def _attention(name: str) -> dict[str, HubTensor]:
    return {f"{name}.{part}.weight": HubTensor(f"{name}.{part}.weight", (1, 2, 0), (2, 1)) for part in "qkv"}


def _feed_forward(name: str, is_gated: bool) -> dict[str, HubTensor]:
    first, second, last = (f"{name}.{part}.weight" for part in ("wi", "wi2", "wo"))
    inner = {f"{name}.wi_0.weight": first, f"{name}.wi_1.weight": second} if is_gated else {first: first}
    return {key: HubTensor(pivot, TURNED) for key, pivot in {**inner, last: last}.items()}


def _block(side: str, dims: T5Dims) -> dict[str, HubTensor]:
    block = f"{side}.block.{{layer}}.layer."
    attentions = [f"{block}0.SelfAttention"]
    if side == "decoder":
        attentions.append(f"{block}1.EncDecAttention")
        own = thirds((f"{attentions[0]}.{part}" for part in "qkv"), f"{attentions[0]}.qkv") | _attention(attentions[1])
    else:
        own = _attention(attentions[0])
    norms = [f"{block}{part}.layer_norm.weight" for part in range(len(attentions) + 1)]
    return {
        **own,
        **{f"{name}.o.weight": HubTensor(f"{name}.o.weight", (2, 0, 1), (1, 2)) for name in attentions},
        **_feed_forward(f"{block}{len(attentions)}.DenseReluDense", dims.is_gated),
        **{name: HubTensor(name) for name in norms},
    }


def _side(side: str, dims: T5Dims) -> dict[str, HubTensor]:
    relative = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    last = f"{side}.final_layer_norm.weight"
    return {relative: HubTensor(relative, TURNED), **_block(side, dims), last: HubTensor(last)}


class _T5:
    model_type, class_name = "t5", "T5ForConditionalGeneration"

    def table(self, dims: T5Dims, is_untied: bool) -> SourceMap:
        """Return how a model's tensors are read; the embedding is the head too where it has none of its own."""
        embedding, head = Rule("shared.weight_T", unchanged), Rule(HEAD_FILE, unchanged)
        outer: dict[Sources, Rules] = (
            {_EMBEDDING: embedding, _HEAD: head} if is_untied else {_EMBEDDING: (embedding, head)}
        )
        blocks = rules_of({**_side("encoder", dims), **_side("decoder", dims)}, FAMILY.schema(dims), dims)
        kind = "an output projection of its own" if is_untied else "tied embeddings"
        return SourceMap(f"Hugging Face T5 with {kind}", {**outer, **blocks}, _IGNORED)

    def written(self, dims: T5Dims, facts: Facts) -> dict[str, HubTensor]:
        """List every tensor by its name in a saved model."""
        return {
            _EMBEDDING: HubTensor("shared.weight_T"),
            **in_every_layer(_side("encoder", dims), dims.encoder_layer_num),
            **in_every_layer(_side("decoder", dims), dims.decoder_layer_num),
            **({} if dims.has_scaled_logits else {_HEAD: HubTensor(HEAD_FILE)}),
        }

    def config(self, dims: T5Dims, facts: Facts) -> dict[str, Any]:
        """List the keys; ``tie_word_embeddings`` means in transformers too that logits are scaled."""
        return {
            **{key: getattr(dims, name) for key, name in SIZES.items()},
            "relative_attention_max_distance": dims.max_distance,
            "layer_norm_epsilon": dims.layernorm_eps,
            "feed_forward_proj": facts.activation or _ACTIVATIONS.get(dims.activation, dims.activation),
            "is_encoder_decoder": True,
            "tie_word_embeddings": dims.has_scaled_logits,
            "bos_token_id": None,
            "pad_token_id": facts.start_id if facts.pad_id is None else facts.pad_id,
            "decoder_start_token_id": facts.start_id,
        }

    def lacks(self, dims: T5Dims, facts: Facts) -> list[str]:
        limits = {
            f"normalization: layernorm, with biases: {dims.has_bias}  (it has RMS norm and no biases)": dims.has_bias,
            "position_embedding_type: absolute  (it has relative positions)": not dims.has_relative_positions,
            f"ia3_num_tasks: {dims.ia3_num_tasks}  (it has no adapters)": dims.ia3_num_tasks > 0,
            f"adapter_inter_size: {dims.adapter_inter_size}  (it has no adapters)": dims.adapter_inter_size > 0,
            f"{_HEAD} differs from the embedding, and logits are scaled  (it scales those of a tied head alone)": (
                dims.has_scaled_logits and not facts.is_head_tied
            ),
            "there is no decoder  (it generates)": not dims.has_decoder,
        }
        return [problem for problem, is_so in limits.items() if is_so]

    def dropped(self, dims: T5Dims, facts: Facts) -> Mapping[str, str]:
        """Name the head where it is the embedding's copy."""
        return {HEAD_FILE: "the tied copy of the embedding"} if dims.has_scaled_logits else {}


T5 = _T5()
