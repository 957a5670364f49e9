"""What the tables of decoder-only models share."""

from __future__ import annotations

from typing import Any

from export_scripts.targets.huggingface.table import Facts, Taken
from ft_format.families.gpt import HEAD_FILE, GptDims

_ACTIVATIONS = {"Gelu": "gelu_new", "Relu": "relu"}


def activation(dims: GptDims, facts: Facts) -> str:
    """Name the feed-forward's function in transformers' words; FasterTransformer's Gelu is the tanh form."""
    return facts.activation or _ACTIVATIONS.get(dims.activation_type, dims.activation_type)


def is_untied(dims: GptDims, facts: Facts) -> bool:
    """Whether the output projection has weights of its own."""
    return dims.has_untied_head and not facts.is_head_tied


def head_if_untied(name: str, dims: GptDims, facts: Facts) -> dict[str, Taken]:
    """List the output projection where it has weights of its own; transformers takes the embedding where it is not."""
    return {name: Taken(HEAD_FILE)} if is_untied(dims, facts) else {}


def tied_copy(dims: GptDims, facts: Facts) -> dict[str, str]:
    """Name the output projection where it is the embedding's copy."""
    return {} if is_untied(dims, facts) else {HEAD_FILE: "the tied copy of the embedding"}


def gpt2_keys(dims: GptDims, facts: Facts) -> dict[str, Any]:
    """List ``config.json`` in the words of GPT-2, which later architectures have taken over."""
    return {
        "vocab_size": dims.vocab_size,
        "n_positions": dims.max_pos_seq_len,
        "n_embd": dims.hidden_units,
        "n_layer": dims.num_layer,
        "n_head": dims.head_num,
        "n_inner": dims.inter_size,
        "layer_norm_epsilon": dims.layernorm_eps,
        "tie_word_embeddings": not is_untied(dims, facts),
    }


def unlike(dims: GptDims, **wanted: tuple[Any, str]) -> list[str]:
    """List the dimensions that an architecture cannot follow, a line each.

    Args:
        dims: of the model.
        wanted: by attribute, the one value that it can follow, and what it has.
    """
    return [
        f"{name}: {getattr(dims, name)}  ({reason})"
        for name, (value, reason) in wanted.items()
        if getattr(dims, name) != value
    ]
