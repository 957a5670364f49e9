"""FasterTransformer's decoder-only models over shards in plain numpy, written from its sources and nothing of ours.

GPT and its variants: ParallelGptContextDecoder.cc. GPT-J: GptJContextDecoder.cc. GPT-NeoX: GptNeoXContextDecoder.cc.
ALiBi: gen_relative_pos_bias.cu. Rotation: decoder_masked_multihead_attention_utils.h. Every rank's arithmetic is done
on that rank's files alone and summed, as tensor parallelism does.
"""

from __future__ import annotations

import configparser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Shards:
    """An FT checkpoint."""

    def __init__(self, root: Path, ranks: int) -> None:
        self.root, self.ranks = root, ranks
        parser = configparser.ConfigParser()
        parser.read(root / "config.ini")
        (self.family,) = parser.sections()
        self.ini: Any = parser[self.family]
        self.heads: int = self.ini.getint("head_num")
        self.size: int = self.ini.getint("size_per_head")
        self.hidden: int = self.heads * self.size
        self.inter: int = self.ini.getint("inter_size")
        self.layers: int = self.ini.getint("num_layer")
        self.vocab: int = self.ini.getint("vocab_size")
        self.dtype = {"fp32": "<f4", "fp16": "<f2"}[self.ini["weight_data_type"]]

    def load(self, name: str, *shape: int) -> Array:
        values = np.fromfile(self.root / f"model.{name}.bin", self.dtype).astype(np.float32)
        return values.reshape(shape)

    def norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.ini.getfloat("layernorm_eps"))
        return scaled * self.load(f"{name}.weight", self.hidden) + self.load(f"{name}.bias", self.hidden)


def forward(root: Path, input_ids: Array) -> Array:
    """Compute logits [batch, length, vocab] in fp32 for ids [batch, length]."""
    ranks = int(root.name.removesuffix("-gpu"))
    shards = Shards(root, ranks)
    body = {"gpt": gpt, "gptj": gptj, "gptneox": gptneox}[shards.family]
    return body(shards, input_ids)


def attention(
    shards: Shards, y: Array, name: str, rank: int, has_bias: bool, turn: Callable[[Array], Array], bias: Array
) -> Array:
    """One rank's heads, up to and with the product with its rows of the output projection, without that's bias."""
    batch, length, _ = y.shape
    local = shards.hidden // shards.ranks
    qkv = y @ shards.load(f"{name}.query_key_value.weight.{rank}", shards.hidden, 3 * local)
    if has_bias:
        qkv = qkv + shards.load(f"{name}.query_key_value.bias.{rank}", 3 * local)
    heads = local // shards.size
    q, k, v = qkv.reshape(batch, length, 3, heads, shards.size).transpose(2, 0, 3, 1, 4)
    first = rank * heads
    scores = turn(q) @ turn(k).swapaxes(-1, -2) / np.sqrt(shards.size) + bias[first : first + heads]
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    context = scores / scores.sum(-1, keepdims=True) @ v
    context = context.swapaxes(1, 2).reshape(batch, length, local)
    return context @ shards.load(f"{name}.dense.weight.{rank}", local, shards.hidden)


def feed_forward(shards: Shards, y: Array, name: str, rank: int, function: Callable[[Array], Array]) -> Array:
    """One rank's features, without the second bias."""
    local = shards.inter // shards.ranks
    z = y @ shards.load(f"{name}.dense_h_to_4h.weight.{rank}", shards.hidden, local)
    z = function(z + shards.load(f"{name}.dense_h_to_4h.bias.{rank}", local))
    return z @ shards.load(f"{name}.dense_4h_to_h.weight.{rank}", local, shards.hidden)


def gelu(z: Array) -> Array:
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def relu(z: Array) -> Array:
    return np.maximum(z, 0)


def as_it_is(x: Array) -> Array:
    return x


def causal(shards: Shards, length: int) -> Array:
    """What is added to scores: [heads, length, length]."""
    return np.repeat(np.triu(np.full((1, length, length), -np.inf, np.float32), 1), shards.heads, 0)


def alibi(shards: Shards, length: int) -> Array:
    """Slope of each head times the distance."""
    power = 2 ** int(np.floor(np.log2(shards.heads)))
    slopes = [(0.5 ** (0.5 ** (np.log2(power) - 3))) ** (h + 1) for h in range(power)]
    base = 0.5 ** (0.5 ** (np.log2(power * 2) - 3))
    slopes += [base ** ((h - power) * 2 + 1) for h in range(power, shards.heads)]
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    return np.array(slopes, np.float32)[:, None, None] * distance


def gpt(shards: Shards, input_ids: Array) -> Array:
    ini, length = shards.ini, input_ids.shape[1]
    flag = ini.getboolean
    x = shards.load("wte", shards.vocab, shards.hidden)[input_ids]
    if flag("has_positional_encoding"):
        x = x + shards.load("wpe", ini.getint("max_pos_seq_len"), shards.hidden)[:length]
    if flag("has_pre_decoder_layernorm"):
        x = shards.norm(x, "pre_decoder_layernorm")
    bias = causal(shards, length)
    if flag("use_attention_linear_bias"):
        bias = bias + alibi(shards, length)
    function = {"Gelu": gelu, "Relu": relu}[ini["activation_type"]]
    is_pre = {"pre_layernorm": True, "post_layernorm": False}[ini["layernorm_type"]]
    ranks = range(shards.ranks)
    for layer in range(shards.layers):
        name = f"layers.{layer}"
        y = shards.norm(x, f"{name}.input_layernorm") if is_pre else x
        x = x + shards.load(f"{name}.attention.dense.bias", shards.hidden)
        x = x + sum(attention(shards, y, f"{name}.attention", rank, True, as_it_is, bias) for rank in ranks)
        x = x if is_pre else shards.norm(x, f"{name}.input_layernorm")
        y = shards.norm(x, f"{name}.post_attention_layernorm") if is_pre else x
        x = x + shards.load(f"{name}.mlp.dense_4h_to_h.bias", shards.hidden)
        x = x + sum(feed_forward(shards, y, f"{name}.mlp", rank, function) for rank in ranks)
        x = x if is_pre else shards.norm(x, f"{name}.post_attention_layernorm")
    if flag("has_post_decoder_layernorm"):
        x = shards.norm(x, "final_layernorm")
    head = "lm_head.weight" if (shards.root / "model.lm_head.weight.bin").exists() else "wte"
    return x @ shards.load(head, shards.vocab, shards.hidden).T


def angles(length: int, rotary: int) -> tuple[Array, Array]:
    """Cosines and sines [length, rotary / 2]."""
    angle = np.arange(length)[:, None] / 10000 ** (np.arange(0, rotary, 2) / rotary)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def turn_pairs(rotary: int) -> Callable[[Array], Array]:
    """GPT-J: elements 2i and 2i + 1 are the two coordinates."""

    def turn(x: Array) -> Array:
        cosine, sine = angles(x.shape[-2], rotary)
        result = x.copy()
        even, odd = x[..., 0:rotary:2], x[..., 1:rotary:2]
        result[..., 0:rotary:2] = even * cosine - odd * sine
        result[..., 1:rotary:2] = odd * cosine + even * sine
        return result

    return turn


def turn_halves(rotary: int) -> Callable[[Array], Array]:
    """GPT-NeoX: elements i and i + rotary / 2 are the two coordinates."""

    def turn(x: Array) -> Array:
        cosine, sine = angles(x.shape[-2], rotary)
        result, half = x.copy(), rotary // 2
        first, second = x[..., :half], x[..., half:rotary]
        result[..., :half] = first * cosine - second * sine
        result[..., half:rotary] = second * cosine + first * sine
        return result

    return turn


def gptj(shards: Shards, input_ids: Array) -> Array:
    turn = turn_pairs(shards.ini.getint("rotary_embedding"))
    bias = causal(shards, input_ids.shape[1])
    x = shards.load("wte", shards.vocab, shards.hidden)[input_ids]
    for layer in range(shards.layers):
        name = f"layers.{layer}"
        y = shards.norm(x, f"{name}.input_layernorm")
        x = x + shards.load(f"{name}.mlp.dense_4h_to_h.bias", shards.hidden)
        for rank in range(shards.ranks):
            x = x + attention(shards, y, f"{name}.attention", rank, False, turn, bias)
            x = x + feed_forward(shards, y, f"{name}.mlp", rank, gelu)
    x = shards.norm(x, "final_layernorm")
    return x @ shards.load("lm_head.weight", shards.vocab, shards.hidden).T + shards.load("lm_head.bias", shards.vocab)


def gptneox(shards: Shards, input_ids: Array) -> Array:
    turn = turn_halves(shards.ini.getint("rotary_embedding"))
    bias = causal(shards, input_ids.shape[1])
    is_parallel = shards.ini.getint("use_gptj_residual") == 1
    x = shards.load("wte", shards.vocab, shards.hidden)[input_ids]
    ranks = range(shards.ranks)
    for layer in range(shards.layers):
        name = f"layers.{layer}"
        y = shards.norm(x, f"{name}.input_layernorm")
        attended = [attention(shards, y, f"{name}.attention", rank, True, turn, bias) for rank in ranks]
        if is_parallel:
            y = shards.norm(x, f"{name}.post_attention_layernorm")
            # Each rank adds the bias and its share of the input, and then the ranks are summed.
            total = shards.load(f"{name}.mlp.attention.bias.sum", shards.hidden)
            x = sum(
                feed_forward(shards, y, f"{name}.mlp", rank, gelu) + attended[rank] + total + x / shards.ranks
                for rank in ranks
            )
        else:
            x = x + sum(attended) + shards.load(f"{name}.attention.dense.bias", shards.hidden)
            y = shards.norm(x, f"{name}.post_attention_layernorm")
            x = x + sum(feed_forward(shards, y, f"{name}.mlp", rank, gelu) for rank in ranks)
            x = x + shards.load(f"{name}.mlp.dense_4h_to_h.bias", shards.hidden)
    return shards.norm(x, "final_layernorm") @ shards.load("lm_head.weight", shards.vocab, shards.hidden).T
