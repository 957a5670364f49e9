"""GPT over FasterTransformer shards in plain numpy, written from the published layout and nothing of ours.

Every rank's arithmetic is done on that rank's files alone and summed, as tensor parallelism does.
"""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def forward(root: Path, input_ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Compute logits [batch, length, vocab] in fp32 for ids [batch, length]."""
    parser = configparser.ConfigParser()
    parser.read(root / "config.ini")
    gpt: Any = parser["gpt"]
    ranks, heads, size = gpt.getint("tensor_para_size"), gpt.getint("head_num"), gpt.getint("size_per_head")
    hidden, inter, vocab = heads * size, gpt.getint("inter_size"), gpt.getint("vocab_size")
    dtype = {"fp32": "<f4", "fp16": "<f2"}[gpt["weight_data_type"]]
    local = hidden // ranks
    batch, length = input_ids.shape

    def load(name: str, *shape: int) -> npt.NDArray[Any]:
        return np.fromfile(root / f"model.{name}.bin", dtype).astype(np.float32).reshape(shape)

    def norm(x: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + gpt.getfloat("layernorm_eps"))
        return scaled * load(f"{name}.weight", hidden) + load(f"{name}.bias", hidden)

    x = load("wte", vocab, hidden)[input_ids] + load("wpe", gpt.getint("max_pos_seq_len"), hidden)[:length]
    hidden_from = np.triu(np.full((length, length), -np.inf, np.float32), 1)
    for layer in range(gpt.getint("num_layer")):
        name = f"layers.{layer}"
        y = norm(x, f"{name}.input_layernorm")
        total = load(f"{name}.attention.dense.bias", hidden)
        for rank in range(ranks):
            weight = load(f"{name}.attention.query_key_value.weight.{rank}", hidden, 3 * local)
            bias = load(f"{name}.attention.query_key_value.bias.{rank}", 3 * local)
            q, k, v = (y @ weight + bias).reshape(batch, length, 3, heads // ranks, size).transpose(2, 0, 3, 1, 4)
            scores = q @ k.swapaxes(-1, -2) / np.sqrt(size) + hidden_from
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            context = scores / scores.sum(-1, keepdims=True) @ v
            context = context.swapaxes(1, 2).reshape(batch, length, local)
            total = total + context @ load(f"{name}.attention.dense.weight.{rank}", local, hidden)
        x = x + total
        y = norm(x, f"{name}.post_attention_layernorm")
        total = load(f"{name}.mlp.dense_4h_to_h.bias", hidden)
        for rank in range(ranks):
            z = y @ load(f"{name}.mlp.dense_h_to_4h.weight.{rank}", hidden, inter // ranks)
            z = z + load(f"{name}.mlp.dense_h_to_4h.bias.{rank}", inter // ranks)
            z = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
            total = total + z @ load(f"{name}.mlp.dense_4h_to_h.weight.{rank}", inter // ranks, hidden)
        x = x + total
    head = "lm_head.weight" if (root / "model.lm_head.weight.bin").exists() else "wte"
    return norm(x, "final_layernorm") @ load(head, vocab, hidden).T
