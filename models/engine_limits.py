"""What of a decoder the drop-in engine does not compute: known before anything is written, and when it starts."""

from __future__ import annotations

from models.blocks.attention import WHOLE
from models.blocks.feed_forward import FeedForward
from models.blocks.multipliers import Multipliers
from models.blocks.rope_scaling import Dynamic, LongRope
from models.blocks.rotary import Rotary
from models.decoder import Decoder


def beyond_engine(decoder: Decoder) -> list[str]:
    """List what no part of the engine computes, ``what  (reason)`` a line each; empty: it serves the model."""
    rotaries = {layer.rotary for layer in decoder.layers if layer.rotary}
    of_model = {
        f"{decoder.expert_num} experts": (decoder.expert_num > 0, "it does not serve mixtures of experts"),
        "sinks": (decoder.attention.has_sinks, "its softmax has the scores of tokens alone"),
        "a clamped gate": (_is_clamped(decoder.feed_forward), "it has SiLU, and neither an offset nor a clamp"),
        "layers with one block": (any(len(layer.blocks) < 2 for layer in decoder.layers), "attention and feed-forward"),
        "Mamba": (decoder.mamba is not None, "it keeps keys and values, and no state"),
        "multipliers": (
            decoder.multipliers not in (None, Multipliers()),
            "it multiplies embeddings, blocks and logits",
        ),
        "the gated delta rule": (decoder.delta is not None, "it keeps keys and values, and no state"),
        "gates of the output": (decoder.attention.has_output_gate, "its attention has none"),
        "neighbours that are rotated": (decoder.attention.rotates_neighbours, "it rotates the halves of a head"),
        "latent attention": (decoder.latent is not None, "every head has its own keys and values"),
        f"{decoder.predictor_num} predictors of further tokens": (decoder.predictor_num > 0, "it predicts the next"),
        "rotated widths that differ": (len({rotary.width for rotary in rotaries}) > 1, "they have one"),
        **{f"rotation {kind}": (True, reason) for kind, reason in _rotations_beyond(decoder, rotaries).items()},
        "one tensor of query, key and value": (decoder.attention.is_fused, "they are three, as gate and up are two"),
        "windows that differ": (len({layer.window for layer in decoder.layers} - {0}) > 1, "they have one size"),
    }
    return [f"{what}  ({reason})" for what, (is_so, reason) in of_model.items() if is_so]


def _is_clamped(one: FeedForward) -> bool:
    return (one.gate_factor, one.up_offset, one.clamp) != (1, 0, 0)


def _rotations_beyond(decoder: Decoder, rotaries: set[Rotary]) -> dict[str, str]:
    """List the kinds of rotation in the way, with the reasons."""
    found, longest = {}, decoder.max_positions
    for rotary in rotaries:
        scaling = rotary.scaling
        if isinstance(scaling, LongRope) and not 0 < longest <= scaling.original_max_position:
            found[scaling.kind] = "angles do not change with a text's length"
        elif isinstance(scaling, Dynamic) and not longest:
            found[scaling.kind] = "angles do not change with a text's length, and config.json names no longest"
        elif scaling and rotary.width < decoder.size_per_head and scaling.attention_factor(longest) != 1:
            found[scaling.kind] = "whole heads are multiplied by its attention_factor"
    return found


def ranks_problem(decoder: Decoder, ranks: int) -> str:
    """Return why ranks cannot share a model's layers; empty: they can, each with a head of keys and values at least."""
    heads, kv_heads, inter = decoder.head_num, decoder.kv_head_num, decoder.inter_size
    if ranks > 1 and decoder.attention.qk_norm == WHOLE:
        return f"{ranks} ranks cannot share heads that are normalised together"
    if heads % ranks == inter % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
        return ""
    return f"{ranks} ranks cannot share {heads} heads, {kv_heads} heads of keys and values and a middle of {inter}"
