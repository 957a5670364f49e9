"""GPT-J's original checkpoint, of mesh-transformer-jax, as FasterTransformer's GPT-J.

Keys are ours: that checkpoint has none, only arrays in the order of ``array_names``. Linear layers are [in, out], as
FasterTransformer's. What every shard adds before the shards are summed (``.shard_3``) is summed here.

Order and meaning: FasterTransformer, examples/pytorch/gptj/utils/gptj_ckpt_convert.py; mesh-transformer-jax,
``mesh_transformer/layers.py``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from export_scripts.tensors.dtypes import Array
from export_scripts.weights.layouts import transposed, unchanged
from export_scripts.weights.schema import ModelDims, Rule, SourceMap, Sources, as_tuple

JOIN_AXES = {
    "wte.weight": 0,
    "attn.q": 1,
    "attn.v": 1,
    "attn.k": 1,
    "attn.out": 0,
    "mlp.in.bias": 0,
    "mlp.in.weight": 1,
    "mlp.out.weight": 0,
    "lm_head.bias": 0,
    "lm_head.weight": 1,
}
"""Axis along which the shards cut an array; what is not here is whole in every shard."""

_FIRST = ("wte.bias", "wte.weight")
_LAYER = ("attn.q", "attn.v", "attn.k", "attn.out", "mlp.in.bias", "mlp.in.weight", "mlp.out.bias", "mlp.out.weight")
_LAYER_NORM = ("ln_1.bias", "ln_1.weight")
_LAST = ("lm_head.bias", "lm_head.weight", "ln_f.bias", "ln_f.weight")
_LAYERS = "model.layers.{layer}."
ARRAYS_A_LAYER = len(_LAYER) + len(_LAYER_NORM)
OTHER_ARRAYS = len(_FIRST) + len(_LAST)


def array_names(layers: int) -> list[str]:
    """Name the arrays of a shard in their order; jax sorts layers as text: 0, 1, 10, 11, ..., 2."""
    order = sorted(range(layers), key=str)
    return [*_FIRST, *(f"h.{layer}.{name}" for layer in order for name in _LAYER + _LAYER_NORM), *_LAST]


def _heads(weight: Array, dims: ModelDims) -> Array:
    """Make a block of one of q, k and v: [hidden, local] becomes [hidden, 1, local heads, size_per_head]."""
    return weight.reshape(len(weight), 1, -1, dims.size_per_head)


def _rows(values: Array, dims: ModelDims) -> Array:
    """Repeat a bias of the embedding for every token; the embedding stays as it is."""
    return values if values.ndim == 2 else np.broadcast_to(values, (dims.vocab_size, *values.shape))


def source_map(shards: int) -> SourceMap:
    """Make the table of a checkpoint of that many shards."""

    def summed(name: str) -> tuple[str, ...]:
        return tuple(f"{name}.shard_{shard}" for shard in range(shards))

    layer: dict[Sources, Rule] = {
        "ln_1.weight.shard_0": Rule("input_layernorm.weight", unchanged),
        "ln_1.bias.shard_0": Rule("input_layernorm.bias", unchanged),
        ("attn.q", "attn.k", "attn.v"): Rule("attention.query_key_value.weight", _heads, 1, concat_axis=1),
        "attn.out": Rule("attention.dense.weight", unchanged, 0),
        "mlp.in.weight": Rule("mlp.dense_h_to_4h.weight", unchanged, 1),
        "mlp.in.bias": Rule("mlp.dense_h_to_4h.bias", unchanged, 0),
        "mlp.out.weight": Rule("mlp.dense_4h_to_h.weight", unchanged, 0),
        summed("mlp.out.bias"): Rule("mlp.dense_4h_to_h.bias", unchanged),
    }
    return SourceMap(
        name="GPT-J's original checkpoint",
        rules={
            ("wte.weight", *summed("wte.bias")): Rule("model.wte", _rows),
            "ln_f.weight.shard_0": Rule("model.final_layernorm.weight", unchanged),
            "ln_f.bias.shard_0": Rule("model.final_layernorm.bias", unchanged),
            "lm_head.weight": Rule("model.lm_head.weight", transposed, 1),
            "lm_head.bias": Rule("model.lm_head.bias", unchanged, 0),
            **{
                tuple(f"h.{{layer}}.{key}" for key in as_tuple(keys)): replace(rule, target=f"{_LAYERS}{rule.target}")
                for keys, rule in layer.items()
            },
        },
        ignored={
            f"*ln_*.shard_[1-9]{more}": "norms are computed with shard 0's; the others kept their first value"
            for more in ("", "[0-9]")
        },
        biases={"*": True},
    )
