"""A small GPT-J in the layout of the slim checkpoints that EleutherAI published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.tiny_models.huggingface_models import HEADS, build

SHARDS, LAYERS = 4, 12  # layers are sorted as text: 0, 1, 10, 11, 2, ...
CONFIG = {"pe_rotary_dims": 4, "eos_token_id": 7, "bos_token_id": 5}


def rounded_model(layers: int = LAYERS, heads: int = HEADS) -> Any:
    """A GPT-J whose weights are few enough bits to be the same in bf16 and fp16, even an eighth of them."""
    model = build("gptj", n_layer=layers, n_head=heads)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 128).round() / 128 + 0.0)  # no zero below zero
    return model


def bits(values: np.ndarray) -> np.ndarray:
    """Store as jax's bfloat16 comes out of numpy: two bytes of no kind."""
    upper = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return upper.astype(np.uint16).view("V2")


def write_slim(model: Any, path: Path, embedding_bias: np.ndarray, shards: int = SHARDS, a_file: int = 5) -> Path:
    """Write the layout that FasterTransformer's gptj_ckpt_convert.py reads, from a Hugging Face model."""
    state = {key.removeprefix("transformer."): value.numpy() for key, value in model.state_dict().items()}
    layers = model.config.n_layer
    for shard in range(shards):

        def cut(values: np.ndarray, axis: int, shard: int = shard) -> np.ndarray:
            return np.split(values, shards, axis)[shard]

        def kept(values: np.ndarray, shard: int = shard) -> np.ndarray:
            """Only shard 0's norms are trained."""
            return values if shard == 0 else np.full_like(values, round(float(values.mean())))

        arrays = [embedding_bias / shards, cut(state["wte.weight"] - embedding_bias, 0)]
        for layer in sorted(str(number) for number in range(layers)):
            w = {key.removeprefix(f"h.{layer}."): value for key, value in state.items() if f"h.{layer}." in key}
            arrays += [cut(w[f"attn.{name}_proj.weight"].T, 1) for name in ("q", "v", "k")]
            arrays += [cut(w["attn.out_proj.weight"].T, 0)]
            arrays += [cut(w["mlp.fc_in.bias"], 0), cut(w["mlp.fc_in.weight"].T, 1)]
            arrays += [w["mlp.fc_out.bias"] / shards, cut(w["mlp.fc_out.weight"].T, 0)]
            arrays += [kept(w["ln_1.bias"]), kept(w["ln_1.weight"])]
        arrays += [cut(state["lm_head.bias"], 0), cut(state["lm_head.weight"].T, 1)]
        arrays += [kept(state["ln_f.bias"]), kept(state["ln_f.weight"])]
        folder = path / f"shard_{shard}"
        folder.mkdir(parents=True)
        for number in range(0, -(-len(arrays) // a_file)):
            np.savez(folder / f"{number}.npz", *map(bits, arrays[number * a_file : (number + 1) * a_file]))
    (path / "config.json").write_text(json.dumps({**CONFIG, "n_heads": model.config.n_head}))
    return path
