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
from export_scripts.weights.architecture import Architecture, Limit
from export_scripts.weights.hub_keys import Keys
from export_scripts.weights.hub_tensor import HubTensor, both, in_layers
from export_scripts.weights.huggingface_opt import LAYER
from export_scripts.weights.schema import DecoderDims, ModelDims, SourceMap, as_tuple
from export_scripts.weights.settings import Settings
from ft_format.families import gpt

_FIRST_POSITION = 2  # XGLMSinusoidalPositionalEmbedding.offset
_PAD_ID = 1
_TENSORS = {
    "model.embed_tokens.weight": HubTensor("model.wte"),
    **in_layers("model.layers.{layer}.", LAYER),
    **both("model.layer_norm", "model.final_layernorm"),
    "lm_head.weight": HubTensor(gpt.HEAD_FILE),
}


def _scaled(values: Array, dims: ModelDims) -> Array:
    """XGLMScaledWordEmbedding."""
    result: Array = values * np.float32(np.sqrt(dims.hidden_units))
    return result


def _positions(pad_id: Any) -> Callable[[ModelDims], Array]:
    """Make the table of positions; transformers fills the row whose number is the padding token's with zeros."""

    def made(dims: ModelDims) -> Array:
        table = _sinusoidal(dims.max_pos_seq_len, dims.hidden_units)
        if isinstance(pad_id, int):
            row = pad_id - _FIRST_POSITION if pad_id >= 0 else len(table) + pad_id
            table[row : row + 1] = 0 if row >= 0 else table[row : row + 1]
        return table

    return made


def _sinusoidal(rows: int, width: int) -> Array:
    """Make a table of sines in its first half and cosines in its second: [rows, width], fp32; an odd one ends with 0.

    Formula: fairseq and transformers, ``XGLMSinusoidalPositionalEmbedding.get_embedding``.
    """
    half = width // 2
    frequencies = np.exp(np.arange(half, dtype=np.float32) * np.float32(-np.log(10000.0) / (half - 1)))
    angles = np.arange(_FIRST_POSITION, _FIRST_POSITION + rows, dtype=np.float32)[:, None] * frequencies
    table = np.zeros((rows, width), np.float32)
    table[:, : 2 * half] = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    return table


class _Xglm(Architecture):
    def table(self, settings: Settings, dims: DecoderDims) -> SourceMap:
        """Scale the embedding unless the configuration says no, and follow the padding token's id."""
        table = super().table(settings, dims)
        table = replace(table, generated={"model.wpe": _positions(settings.get("pad_token_id", _PAD_ID))})
        if not settings.get("scale_embedding", True):
            return table
        scaled, *others = as_tuple(table.rules[self.embedding])
        rules = (replace(scaled, elementwise=_scaled), *others)
        return replace(table, rules={**table.rules, self.embedding: rules})


XGLM = _Xglm(
    model_type="xglm",
    class_name="XGLMForCausalLM",
    title="XGLM",
    family=gpt.FAMILY,
    tensors=lambda dims: _TENSORS,
    ignored={"embed_positions.weights": "the table of positions, which is computed"},
    keys=Keys(
        {
            "vocab_size": "vocab_size",
            "max_position_embeddings": "max_pos_seq_len",
            "d_model": "hidden_units",
            "ffn_dim": "inter_size",
            "num_layers": "num_layer",
            "attention_heads": "head_num",
        }
    ),
    more_dims=lambda settings: {"has_untied_head": bool(settings.get("scale_embedding", True))},
    prefix="model.",
    embedding="embed_tokens.weight",
    aliases={"num_attention_heads": "attention_heads", "hidden_size": "d_model", "num_hidden_layers": "num_layers"},
    activation=("activation_function", "gelu"),
    limits={"add_cross_attention": Limit((False, None), "it has no encoder")},
)
