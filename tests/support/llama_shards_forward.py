"""The Llama family over FT shards in plain numpy, written from void-main's sources and transformers' modeling files.

Every rank's arithmetic is done on that rank's files alone and summed, as tensor parallelism does.
"""

from __future__ import annotations

import configparser
import math
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
        self.hidden = self.ini.getint("hidden_units", self.heads * self.size)
        self.inter = self.ini.getint("inter_size") // self.ranks
        self.eps = self.ini.getfloat("layernorm_eps")
        self.dtype = {"fp32": "<f4", "fp16": "<f2"}[self.ini["weight_data_type"]]

    def number(self, key: str, default: float = 0.0) -> float:
        return float(self.ini.get(key, default))

    def load(self, name: str, *shape: int) -> Array:
        return np.fromfile(self.root / f"model.{name}.bin", self.dtype).astype(np.float32).reshape(shape)

    def bias(self, name: str, *shape: int) -> Array | float:
        return self.load(name, *shape) if (self.root / f"model.{name}.bin").exists() else 0.0

    def scale(self, name: str, width: int) -> Array:
        return self.load(f"{name}.weight", width) + np.float32(self.number("has_zero_centred_norms"))

    def norm(self, x: Array, name: str) -> Array:
        if self.ini.get("layernorm_type", "rmsnorm") == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        return _rms(x, self.eps) * self.scale(name, self.hidden) + self.bias(f"{name}.bias", self.hidden)

    def angles(self, length: int) -> Array:
        width, theta = self.ini.getint("rotary_embedding"), self.number("rope_theta", 10000.0)
        waves = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
        factor, kind = self.number("rope_scaling_factor", 1.0), self.ini.get("rope_type", "default")
        if kind == "linear":
            waves = waves * factor
        if kind == "llama3":
            low, high = self.number("rope_low_freq_factor"), self.number("rope_high_freq_factor")
            turns = self.number("rope_original_max_position") / waves
            share = np.clip((turns - low) / (high - low), 0, 1)
            waves = 1 / ((1 - share) / (waves * factor) + share / waves)
        return np.arange(length)[:, None] * 2 * np.pi / waves

    def turn(self, x: Array) -> Array:
        angles = self.angles(x.shape[-2]).astype(np.float32)
        half, cosine, sine = angles.shape[-1], np.cos(angles), np.sin(angles)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], -1)

    def mask(self, layer: int, length: int) -> Array:
        distance = np.arange(length)[:, None] - np.arange(length)[None]
        which, window = self.ini.get("attention_window_layers", "1"), int(self.number("attention_window"))
        seen = distance >= 0
        if window and which[layer % len(which)] == "1":
            seen &= distance < window
        return np.where(seen, 0.0, -np.inf).astype(np.float32)

    def attention(self, y: Array, layer: int, rank: int) -> Array:
        batch, length, _ = y.shape
        name, heads, kv = f"layers.{layer}.attention", self.heads // self.ranks, self.kv // self.ranks
        columns = (heads + 2 * kv) * self.size
        qkv = y @ self.load(f"{name}.query_key_value.weight.{rank}", self.hidden, columns)
        qkv = qkv + self.bias(f"{name}.query_key_value.bias.{rank}", columns)
        parts = np.split(qkv.reshape(batch, length, -1, self.size).swapaxes(1, 2), [heads, heads + kv], 1)
        if self.number("qk_norm"):
            for index, kind in enumerate(("query", "key")):
                parts[index] = _rms(parts[index], self.eps) * self.scale(f"{name}.{kind}_norm", self.size)
        q, k = self.turn(parts[0]), self.turn(parts[1])
        k, v = (np.repeat(each, heads // kv, 1) for each in (k, parts[2]))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(self.number("attention_scalar") or self.size)
        scores = self.capped(scores, "attn_logit_softcap") + self.mask(layer, length)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        context = (scores / scores.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(batch, length, -1)
        return context @ self.load(f"{name}.dense.weight.{rank}", heads * self.size, self.hidden)

    def capped(self, values: Array, key: str) -> Array:
        cap = self.number(key)
        return np.tanh(values / cap) * cap if cap else values

    def activation(self, z: Array) -> Array:
        name = self.ini.get("activation_type", "silu")
        if name == "silu":
            return z / (1 + np.exp(-z))
        if name == "gelu":
            return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        if name == "exact_gelu":
            return 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
        return np.maximum(z, 0) ** {"relu": 1, "reglu": 1, "squared_relu": 2}[name]

    def feed_forward(self, y: Array, layer: int, rank: int) -> Array:
        name = f"layers.{layer}.mlp"

        def inner(kind: str) -> Array:
            product = y @ self.load(f"{name}.{kind}.weight.{rank}", self.hidden, self.inter)
            return product + self.bias(f"{name}.{kind}.bias.{rank}", self.inter)

        z = inner("up_proj")
        z = self.activation(inner("gate_proj")) * z if self.number("is_gated", 1) else self.activation(z)
        return z @ self.load(f"{name}.down_proj.weight.{rank}", self.inter, self.hidden)

    def logits(self, input_ids: Array) -> Array:
        vocab = self.ini.getint("vocab_size")
        x = self.load("wte.weight", vocab, self.hidden)[input_ids] * np.float32(self.number("embedding_scale", 1.0))
        for layer in range(self.ini.getint("num_layer")):
            name = f"layers.{layer}"
            y = self.norm(x, f"{name}.input_layernorm")
            total = sum(self.attention(y, layer, rank) for rank in range(self.ranks))
            x = x + self.behind(total + self.bias(f"{name}.attention.dense.bias", self.hidden), name, "attention")
            y = self.norm(x, f"{name}.post_attention_layernorm")
            total = sum(self.feed_forward(y, layer, rank) for rank in range(self.ranks))
            x = x + self.behind(total + self.bias(f"{name}.mlp.down_proj.bias", self.hidden), name, "mlp")
        x = self.norm(x, "final_layernorm")
        return self.capped(x @ self.load("lm_head.weight", vocab, self.hidden).T, "final_logit_softcap")

    def behind(self, total: Array, layer: str, block: str) -> Array:
        return self.norm(total, f"{layer}.{block}_output_layernorm") if self.number("has_output_norms") else total
