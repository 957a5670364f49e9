"""Llama over FT shards in plain numpy, written from void-main's sources.

Every rank's arithmetic is done on that rank's files alone and summed, as tensor parallelism does.
"""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def forward(root: Path, input_ids: Array) -> Array:
    """Compute logits [batch, length, vocab] in fp32 for ids [batch, length]."""
    return _Llama(root).logits(input_ids)


def _rms(x: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


class _Llama:
    def __init__(self, root: Path) -> None:
        self.root, self.ranks = root, int(root.name.removesuffix("-gpu"))
        parser = configparser.ConfigParser()
        parser.read(root / "config.ini")
        self.ini: Any = parser["llama"]
        self.heads, self.size = self.ini.getint("head_num"), self.ini.getint("size_per_head")
        self.kv = self.ini.getint("kv_head_num")
        self.hidden = self.heads * self.size
        self.inter = self.ini.getint("inter_size") // self.ranks
        self.eps = self.ini.getfloat("layernorm_eps")
        self.dtype = {"fp32": "<f4", "fp16": "<f2"}[self.ini["weight_data_type"]]

    def number(self, key: str, default: float = 0.0) -> float:
        return float(self.ini.get(key, default))

    def load(self, name: str, *shape: int) -> Array:
        return np.fromfile(self.root / f"model.{name}.bin", self.dtype).astype(np.float32).reshape(shape)

    def norm(self, x: Array, name: str) -> Array:
        return _rms(x, self.eps) * self.load(f"{name}.weight", self.hidden)

    def angles(self, length: int) -> Array:
        width, theta = self.ini.getint("rotary_embedding"), self.number("rope_theta", 10000.0)
        waves = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
        waves = waves * self.number("rope_scaling_factor", 1.0)
        return np.arange(length)[:, None] * 2 * np.pi / waves

    def turn(self, x: Array) -> Array:
        angles = self.angles(x.shape[-2]).astype(np.float32)
        half, cosine, sine = angles.shape[-1], np.cos(angles), np.sin(angles)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], -1)

    def attention(self, y: Array, layer: int, rank: int) -> Array:
        batch, length, _ = y.shape
        name, heads, kv = f"layers.{layer}.attention", self.heads // self.ranks, self.kv // self.ranks
        columns = (heads + 2 * kv) * self.size
        qkv = y @ self.load(f"{name}.query_key_value.weight.{rank}", self.hidden, columns)
        parts = np.split(qkv.reshape(batch, length, -1, self.size).swapaxes(1, 2), [heads, heads + kv], 1)
        q, k = self.turn(parts[0]), self.turn(parts[1])
        k, v = (np.repeat(each, heads // kv, 1) for each in (k, parts[2]))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(self.size)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        context = (scores / scores.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(batch, length, -1)
        return context @ self.load(f"{name}.dense.weight.{rank}", heads * self.size, self.hidden)

    def feed_forward(self, y: Array, layer: int, rank: int) -> Array:
        name, shape = f"layers.{layer}.mlp", (self.hidden, self.inter)
        z = y @ self.load(f"{name}.gate_proj.weight.{rank}", *shape)
        z = z / (1 + np.exp(-z)) * (y @ self.load(f"{name}.up_proj.weight.{rank}", *shape))
        return z @ self.load(f"{name}.down_proj.weight.{rank}", self.inter, self.hidden)

    def logits(self, input_ids: Array) -> Array:
        vocab = self.ini.getint("vocab_size")
        x = self.load("wte.weight", vocab, self.hidden)[input_ids]
        for layer in range(self.ini.getint("num_layer")):
            name = f"layers.{layer}"
            y = self.norm(x, f"{name}.input_layernorm")
            x = x + sum(self.attention(y, layer, rank) for rank in range(self.ranks))
            y = self.norm(x, f"{name}.post_attention_layernorm")
            x = x + sum(self.feed_forward(y, layer, rank) for rank in range(self.ranks))
        return self.norm(x, "final_layernorm") @ self.load("lm_head.weight", vocab, self.hidden).T
