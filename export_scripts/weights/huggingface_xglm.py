"""Hugging Face XGLM as FasterTransformer's GPT: computed positions, and embeddings times the root of the width.

Keys and formulas: transformers, ``models/xglm/modeling_xglm.py``. The output projection is the embedding without
that factor, so that it becomes a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from export_scripts.tensors.dtypes import Array
from export_scripts.weights.architecture import Architecture, Limit, Settings, in_layers, sinusoidal_positions
from export_scripts.weights.huggingface_opt import LAYER
from export_scripts.weights.layouts import unchanged
from export_scripts.weights.schema import ModelDims, Rule, SourceMap
from ft_format.families import gpt

_FIRST_POSITION = 2  # XGLMSinusoidalPositionalEmbedding.offset
_PAD_ID = 1


def _scaled(values: Array, dims: ModelDims) -> Array:
    """XGLMScaledWordEmbedding."""
    result: Array = values * np.float32(np.sqrt(dims.hidden_units))
    return result


def _positions(pad_id: Any) -> Callable[[ModelDims], Array]:
    """Make the table of positions; transformers fills the row whose number is the padding token's with zeros."""

    def made(dims: ModelDims) -> Array:
        table = sinusoidal_positions(dims.max_pos_seq_len, dims.hidden_units, _FIRST_POSITION)
        if isinstance(pad_id, int):
            row = pad_id - _FIRST_POSITION if pad_id >= 0 else len(table) + pad_id
            table[row : row + 1] = 0 if row >= 0 else table[row : row + 1]
        return table

    return made


_TABLE = SourceMap(
    name="Hugging Face XGLM",
    rules={
        "embed_tokens.weight": Rule("model.wte", unchanged, elementwise=_scaled),
        "layer_norm.weight": Rule("model.final_layernorm.weight", unchanged),
        "layer_norm.bias": Rule("model.final_layernorm.bias", unchanged),
        "lm_head.weight": Rule("model.lm_head.weight", unchanged),
        **in_layers("layers.{layer}.", LAYER),
    },
    ignored={"embed_positions.weights": "the table of positions, which is computed"},
    generated={"model.wpe": _positions(_PAD_ID)},
)


def _adapted(table: SourceMap, settings: Settings) -> SourceMap:
    """Leave the embedding as it is where the configuration says so, and follow the padding token's id."""
    table = replace(table, generated={"model.wpe": _positions(settings.get("pad_token_id", _PAD_ID))})
    if settings.get("scale_embedding", True):
        return table
    return replace(table, rules={**table.rules, "embed_tokens.weight": Rule("model.wte", unchanged)})


def _dims(settings: Settings) -> ModelDims:
    return ModelDims(
        head_num=settings.size("attention_heads"),
        size_per_head=settings.head_size("d_model", "attention_heads"),
        inter_size=settings.size("ffn_dim"),
        num_layer=settings.size("num_layers"),
        max_pos_seq_len=settings.size("max_position_embeddings"),
        vocab_size=settings.size("vocab_size"),
        has_untied_head=bool(settings.get("scale_embedding", True)),
        activation_type=settings.activation("activation_function", "gelu"),
    )


XGLM = Architecture(
    model_type="xglm",
    family=gpt.FAMILY,
    source_map=_TABLE,
    dims=_dims,
    prefix="model.",
    embedding="embed_tokens.weight",
    aliases={"num_attention_heads": "attention_heads", "hidden_size": "d_model", "num_hidden_layers": "num_layers"},
    activation=("activation_function", "gelu"),
    adapt=_adapted,
    limits={
        "add_cross_attention": Limit((False, None), "it has no encoder"),
    },
)
