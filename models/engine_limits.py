"""What of a decoder the drop-in engine does not compute: known before anything is written, and when it starts."""

from __future__ import annotations

from models.blocks.attention import UNIT
from models.blocks.rope_scaling import Dynamic, LongRope, Scaling
from models.decoder import Decoder
from models.mxfp4 import GROUP

_NO_LONGEST = "angles do not change with a text's length, and config.json names no longest"


def beyond_engine(decoder: Decoder) -> list[str]:
    """List what no part of the engine computes, ``what  (reason)`` a line each; empty: it serves the model."""
    of_model = {
        "a clamped gate": (_clamps_for_all(decoder), "experts alone have an offset and a clamp"),
        "a factor of rotated queries and keys": (_norms_factors(decoder), "norms without weights, behind it, undo it"),
        **{f"rotation {kind}": (_changes(decoder, kind), _NO_LONGEST) for kind in (LongRope.kind, Dynamic.kind)},
    }
    return [f"{what}  ({reason})" for what, (is_so, reason) in of_model.items() if is_so]


def _clamps_for_all(decoder: Decoder) -> bool:
    """Return whether a feed-forward that every token uses has a clamped gate."""
    is_there = any("feed_forward" in layer.blocks for layer in decoder.layers)
    shared = decoder.mixture.shared_inter_size if decoder.mixture else 0
    return decoder.feed_forward.is_clamped and bool(is_there or shared)


def _norms_factors(decoder: Decoder) -> bool:
    """Return whether a norm behind the rotation undoes a factor of it; without one it computes the same before it."""
    rotaries = [layer.rotary for layer in decoder.layers if layer.rotary]
    has_factor = any(each.attention_factor(decoder.max_positions) != 1 for each in rotaries)
    return decoder.attention.qk_norm == UNIT and has_factor


def _changes(decoder: Decoder, kind: str) -> bool:
    """Return whether angles of a kind change with a text's length, and it is not known from which length on."""
    return not decoder.max_positions and any(scaling.kind == kind for scaling in _scalings(decoder))


def _scalings(decoder: Decoder) -> list[Scaling]:
    return [layer.rotary.scaling for layer in decoder.layers if layer.rotary and layer.rotary.scaling]


def longest_text(decoder: Decoder) -> int:
    """Return how many tokens a text has at most that the engine serves; 0: it is not known.

    Beyond the original length longrope has other angles for all tokens of a text, those that are cached among them; in
    transformers the longest text of a batch decides for all of them. So texts end there.
    """
    lengths = (scaling.original_max_position for scaling in _scalings(decoder) if isinstance(scaling, LongRope))
    return min((decoder.max_positions, *lengths))


def fp8_problem(decoder: Decoder | None, are_fp8: bool = False) -> str:
    """Return why matrices cannot become FP8 when they are loaded; empty: they can.

    Args:
        decoder: of a Hugging Face directory; None: the weights are shards.
        are_fp8: whether its matrices are FP8.
    """
    if decoder is None:
        return "quantization with FasterTransformer's shards, which have int8_mode alone"
    if are_fp8:
        return "quantization with weights of FP8, which are served as they are stored"
    has_arrays = decoder.mixture and decoder.mixture.is_in_arrays
    return "quantization with experts in arrays, which are served as they are stored" if has_arrays else ""


def int8_problem(kind: str) -> str:
    """Return why weights cannot be int8 when they are loaded; ``kind``: as what they are stored; empty: they can."""
    return f"int8_mode with weights of {kind}, which are served as they are stored" if kind else ""


def cache_problem(decoder: Decoder) -> str:
    """Return why a model's keys and values cannot be kept as FP8; empty: they can."""
    return "kv_cache_dtype fp8 with latent attention, whose vectors stay as they are computed" if decoder.latent else ""


def predictor_problem(decoder: Decoder | None) -> str:
    """Return why a model does not draft for itself; empty: it does."""
    if decoder is None or not decoder.predictor_num + decoder.predictors_beside:
        which = decoder and decoder.model_type
        none = f", or {which} none that is run" if which else ""
        return f"speculation mtp, and the model has no layer that predicts further tokens{none}"
    if {"mamba", "delta"} & {name for blocks in decoder.predictor_blocks for name in blocks}:
        return "speculation mtp, and the predictor's layers keep states, which cannot go back by wrong tokens"
    return ""


def head_problem(model: Decoder | None, stages: int) -> str:
    """Return why no EAGLE-3 head drafts for a model of some stages of layers; empty: one may."""
    if model is None:
        return "speculation eagle3 with FasterTransformer's shards; a head drafts for a Hugging Face directory"
    if stages > 1:
        return f"speculation eagle3 with {stages} pipeline stages; a head works on layers of several stages"
    if model.mamba or model.delta:
        return "speculation eagle3 with layers that keep states; a head drafts for layers with attention"
    return ""


def draft_model_problem(draft: Decoder | None, draft_vocab_size: int, vocab_size: int) -> str:
    """Return why a small model cannot draft for a model of a vocabulary; empty: it can."""
    if draft is None:
        return "a draft model is a Hugging Face directory of a decoder"
    if draft_vocab_size != vocab_size:
        return f"the draft model has {draft_vocab_size} tokens, and the model {vocab_size}: the vocabulary must be one"
    has_states = draft.mamba or draft.delta
    return "the draft model's layers keep states, which cannot go back by wrong tokens" if has_states else ""


def ranks_problem(decoder: Decoder, ranks: int) -> str:
    """Return why ranks cannot share a model's layers; empty: they can, each with a head of keys and values at least."""
    heads, kv_heads, middles = decoder.head_num, decoder.kv_head_num, _middles(decoder)
    if problem := _states_problem(decoder, ranks):
        return problem
    if heads % ranks == 0 == sum(each % ranks for each in middles) and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
        return ""
    widths = " and ".join(map(str, middles))
    return f"{ranks} ranks cannot share {heads} heads, {kv_heads} heads of keys and values and a middle of {widths}"


def groups_problem(decoder: Decoder, ranks: int) -> str:
    """Return why ranks cannot share matrices of MXFP4; empty: they can, each with whole groups of their columns."""
    middle = decoder.mixture.inter_size if decoder.mixture else 0
    if not middle % (GROUP * ranks):
        return ""
    return (
        f"{ranks} ranks cannot share experts of MXFP4 in groups of {GROUP} of a middle of {middle}, but have them whole"
    )


def experts_problem(decoder: Decoder | None, ranks: int) -> str:
    """Return why ranks cannot have experts whole; empty: they can."""
    if not (decoder and decoder.mixture):
        return "enable_expert_parallel = 1, and the model has no experts"
    count = decoder.mixture.expert_num
    return f"enable_expert_parallel = 1, and {ranks} ranks cannot share {count} experts" if count % ranks else ""


def _states_problem(decoder: Decoder, ranks: int) -> str:
    """Return why ranks cannot share layers that keep states."""
    mamba, delta = decoder.mamba, decoder.delta
    if delta and delta.key_head_num % ranks:
        return f"{ranks} ranks cannot share {delta.key_head_num} heads of keys of the gated delta rule"
    if not mamba or (mamba.head_num % ranks == 0 == mamba.group_num % ranks):
        return ""
    if mamba.head_num % ranks == 0 == ranks % mamba.group_num and not mamba.has_norm:
        return ""  # ranks have copies of what a group shares
    together = ", which are normalised together" if mamba.has_norm else ""
    return f"{ranks} ranks cannot share {mamba.head_num} heads of Mamba in {mamba.group_num} groups{together}"


def _middles(decoder: Decoder) -> list[int]:
    """List the widths of the middles of feed-forwards and experts."""
    blocks, mixture = {name for layer in decoder.layers for name in layer.blocks}, decoder.mixture
    found = [decoder.inter_size] if "feed_forward" in blocks else []
    return found + ([each for each in (mixture.inter_size, mixture.shared_inter_size) if each] if mixture else [])
