"""NeMo's T5 and mT5, as FasterTransformer's T5.

Keys: NeMo 1.23, ``token_level_encoder_decoder.py`` and ``transformer.py``; where training's tensor parallelism cuts:
``attention.py`` and ``mlp.py`` (column-parallel linears along rows, row-parallel ones along columns).
"""

from __future__ import annotations

from dataclasses import dataclass

from export_scripts.weights.layouts import plus_one, transposed, unchanged
from export_scripts.weights.schema import Layout, Rule, Rules, SourceMap, Sources
from export_scripts.weights.t5_layouts import fused_block, fused_part, half, output, projection

_OUTER = "enc_dec_model."
_RELATIVE = "relative_position_embedding.relative_position_embedding.weight"


@dataclass(frozen=True)
class Variant:
    """What tells one NeMo T5 from another, beyond its dimensions.

    Attributes:
        has_untied_head: ``tokens_head.weight`` is there; else the decoder's embedding serves.
        is_legacy: fused projections are ordered by q, k, v rather than by head (``megatron_legacy``).
        has_fused_gate: one projection yields both halves of a gated feed-forward (the "fast-" activations).
        has_norm_less_one: norms store their weight - 1 (``layernorm1p``).
    """

    has_untied_head: bool = False
    is_legacy: bool = False
    has_fused_gate: bool = False
    has_norm_less_one: bool = False


def source_map(variant: Variant) -> SourceMap:
    """Make the table of a variant."""
    embedding, head = Rule("shared.weight_T", unchanged, 0), Rule("lm_head.weight", unchanged, 0)
    words = f"{_OUTER}encoder_embedding.word_embeddings.weight"
    rules: dict[Sources, Rules] = {
        words: embedding if variant.has_untied_head else (embedding, head),
        f"{_OUTER}encoder_embedding.position_embeddings.weight": Rule("shared.ape", unchanged),
        f"{_OUTER}tokens_head.bias": Rule("shared.bias", unchanged, 0),
    }
    if variant.has_untied_head:
        rules[f"{_OUTER}tokens_head.weight"] = head
    for side in ("encoder", "decoder"):
        relative = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rules[f"{_OUTER}{side}_{_RELATIVE}"] = Rule(relative, transposed)
        rules |= _side(side, variant)
    return SourceMap(
        name="NeMo T5",
        rules=rules,
        ignored={
            "*._extra_state": "Transformer Engine's FP8 scaling; None or bytes, no weights",
            f"{_OUTER}decoder_embedding.*": "the encoder's embedding again (share_token_embeddings)",
            f"{_OUTER}word_embeddings.weight": "the last pipeline stage's copy of the embedding",
        },
        copies={
            f"{_OUTER}word_embeddings.weight": words,
            **{
                f"{_OUTER}decoder_embedding.{table}": f"{_OUTER}encoder_embedding.{table}"
                for table in ("word_embeddings.weight", "position_embeddings.weight")
            },
        },
    )


def _side(side: str, variant: Variant) -> dict[Sources, Rules]:
    """Lay out encoder or decoder; the decoder's second attention moves its feed-forward and norms on by one."""
    is_decoder = side == "decoder"
    source, block = f"{_OUTER}{_OUTER}{side}.model.layers.{{layer}}.", f"{side}.block.{{layer}}."
    own, feed_forward = f"{block}layer.0.SelfAttention", f"{block}layer.{2 if is_decoder else 1}.DenseReluDense"
    rules = {
        **_norms(f"{_OUTER}{_OUTER}{side}.model.final_layernorm", f"{side}.final_layer_norm", variant),
        **_norms(f"{source}input_layernorm", f"{block}layer.0.layer_norm", variant),
        **_norms(f"{source}post_attention_layernorm", f"{block}layer.1.layer_norm", variant),
        **_fused(f"{source}self_attention.query_key_value", own, "qkv", variant, is_decoder),
        **_dense(f"{source}self_attention.dense", f"{own}.o", output),
        **_up(f"{source}mlp.dense_h_to_4h", feed_forward, variant),
        **_dense(f"{source}mlp.dense_4h_to_h", f"{feed_forward}.wo", transposed),
    }
    if is_decoder:
        cross, inter = f"{block}layer.1.EncDecAttention", f"{source}inter_attention"
        rules |= {
            **_norms(f"{source}post_inter_attention_layernorm", f"{block}layer.2.layer_norm", variant),
            **_both(f"{inter}.query", f"{cross}.q", projection, projection),
            **_fused(f"{inter}.key_value", cross, "kv", variant, is_block=False),
            **_dense(f"{inter}.dense", f"{cross}.o", output),
        }
    return rules


def _both(source: str, target: str, weight: Layout, bias: Layout) -> dict[Sources, Rules]:
    """A column-parallel linear."""
    return {
        f"{source}.weight": Rule(f"{target}.weight", weight, 0),
        f"{source}.bias": Rule(f"{target}.bias", bias, 0),
    }


def _dense(source: str, target: str, layout: Layout) -> dict[Sources, Rules]:
    """A row-parallel linear."""
    return {
        f"{source}.weight": Rule(f"{target}.weight", layout, 1),
        f"{source}.bias": Rule(f"{target}.bias", unchanged),
    }


def _norms(source: str, target: str, variant: Variant) -> dict[Sources, Rules]:
    return {
        f"{source}.weight": Rule(
            f"{target}.weight", unchanged, elementwise=plus_one if variant.has_norm_less_one else None
        ),
        f"{source}.bias": Rule(f"{target}.bias", unchanged),
    }


def _fused(source: str, target: str, parts: str, variant: Variant, is_block: bool) -> dict[Sources, Rules]:
    """Fused projections: one block to the decoder, a file each elsewhere."""
    if is_block:
        block = fused_block(variant.is_legacy)
        return _both(source, f"{target}.{parts}", block, block)
    takes = {part: fused_part(index, len(parts), variant.is_legacy) for index, part in enumerate(parts)}
    return {
        f"{source}.{kind}": tuple(Rule(f"{target}.{part}.{kind}", take, 0) for part, take in takes.items())
        for kind in ("weight", "bias")
    }


def _up(source: str, target: str, variant: Variant) -> dict[Sources, Rules]:
    """The feed-forward's first projection, and a gate's second."""
    if not variant.has_fused_gate:
        return {
            **_both(source, f"{target}.wi", transposed, unchanged),
            **_both(f"{source}_2", f"{target}.wi2", transposed, unchanged),
        }
    return {
        f"{source}.{kind}": (Rule(f"{target}.wi.{kind}", half(0), 0), Rule(f"{target}.wi2.{kind}", half(1), 0))
        for kind in ("weight", "bias")
    }
