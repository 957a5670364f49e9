"""What of a decoder the drop-in engine does not compute: known before anything is written, and when it starts."""

from __future__ import annotations

from models.blocks.attention import WHOLE
from models.decoder import Decoder


def beyond_engine(decoder: Decoder) -> list[str]:
    """List what no part of the engine computes, ``what  (reason)`` a line each; empty: it serves the model."""
    of_model = {
        f"{decoder.expert_num} experts": (decoder.expert_num > 0, "it does not serve mixtures of experts"),
        "rotated widths that differ": (len({layer.rotary.width for layer in decoder.layers}) > 1, "they have one"),
        "windows that differ": (len({layer.window for layer in decoder.layers} - {0}) > 1, "they have one size"),
    }
    return [f"{what}  ({reason})" for what, (is_so, reason) in of_model.items() if is_so]


def ranks_problem(decoder: Decoder, ranks: int) -> str:
    """Return why ranks cannot share a model's layers; empty: they can, each with a head of keys and values at least."""
    heads, kv_heads, inter = decoder.head_num, decoder.kv_head_num, decoder.inter_size
    if ranks > 1 and decoder.attention.qk_norm == WHOLE:
        return f"{ranks} ranks cannot share heads that are normalised together"
    if heads % ranks == inter % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
        return ""
    return f"{ranks} ranks cannot share {heads} heads, {kv_heads} heads of keys and values and a middle of {inter}"
