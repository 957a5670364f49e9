"""T5 over FasterTransformer shards in plain numpy, written from FasterTransformer's kernels and nothing of ours.

Every rank's arithmetic is done on that rank's files alone and summed, as tensor parallelism does. What is read from
``config.ini``, and its defaults, are those of T5TritonModel.cc; the epsilon is a constant there and a key here.
"""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def relative_buckets(queries: int, keys: int, buckets: int, is_bidirectional: bool) -> Array:
    """Bucket of each pair [queries, keys]; buildRelativeAttentionBias of unfused_attention_kernels.cu."""
    distance = np.arange(keys)[None, :] - np.arange(queries)[:, None]
    result = np.zeros_like(distance)
    if is_bidirectional:
        buckets //= 2
        result += np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = -np.minimum(distance, 0)
    exact = buckets // 2
    with np.errstate(divide="ignore"):
        far = np.log(distance.astype(np.float32) / exact) / np.log(128 / exact) * (buckets - exact)
    large = np.minimum(exact + np.where(distance > 0, far, 0).astype(np.int64), buckets - 1)
    return result + np.where(distance < exact, distance, large)


class T5:
    """The shards of one directory."""

    def __init__(self, root: Path, ia3_task: int | None = None) -> None:
        parser = configparser.ConfigParser()
        parser.read(root / "config.ini")
        encoder: Any
        decoder: Any
        structure: Any
        encoder, decoder, structure = parser["encoder"], parser["decoder"], parser["structure"]
        self.root, self.ia3_task = root, ia3_task
        self.ranks = encoder.getint("tensor_para_size")
        self.heads, self.size = encoder.getint("num_heads"), encoder.getint("d_kv")
        self.width, self.inter = encoder.getint("d_model"), encoder.getint("d_ff")
        self.vocab = encoder.getint("vocab_size")
        self.positions = encoder.getint("relative_attention_num_buckets_or_max_pos_seq_len")
        self.layers = {"encoder": encoder.getint("num_layers"), "decoder": decoder.getint("num_layers")}
        self.activation = encoder["feed_forward_proj"]
        self.epsilon = float(encoder.get("layer_norm_epsilon", "1e-6"))
        self.has_bias = structure.getboolean("t5_with_bias", fallback=False)
        self.is_gated = structure.getboolean("use_gated_activation", fallback=False)
        self.is_relative = structure.get("position_embedding_type", "relative") == "relative"
        self.ia3_tasks = structure.getint("ia3_num_tasks", fallback=0)
        is_tied = decoder.getboolean("tie_word_embeddings", fallback=True)
        self.logit_scale = self.width**-0.5 if is_tied and not self.has_bias else 1.0
        self.dtype = {"fp32": "<f4", "fp16": "<f2"}[encoder["weight_data_type"]]

    def load(self, name: str, *shape: int) -> Array:
        return np.fromfile(self.root / f"{name}.bin", self.dtype).astype(np.float32).reshape(shape)

    def bias(self, name: str, *shape: int) -> Array | float:
        return self.load(name, *shape) if self.has_bias else 0.0

    def norm(self, x: Array, name: str) -> Array:
        if self.has_bias:
            x = x - x.mean(-1, keepdims=True)
        scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.epsilon) * self.load(f"{name}.weight", self.width)
        return scaled + self.bias(f"{name}.bias", self.width)

    def embed(self, ids: Array) -> Array:
        x = self.load("shared.weight_T", self.vocab, self.width)[ids]
        if self.is_relative:
            return x
        return x + self.load("shared.ape", self.positions, self.width)[: ids.shape[1]]

    def ia3(self, name: str, rank: int, size: int) -> Array | float:
        if self.ia3_task is None:
            return 1.0
        return self.load(f"{name}.ia3.weight.{rank}", self.ia3_tasks, size)[self.ia3_task]

    def attention(self, x: Array, memory: Array, name: str, mask: Array, position_bias: list[Array]) -> Array:
        """Sum the ranks' outputs; ``position_bias`` holds [heads / ranks, queries, keys] of each rank."""
        local = self.heads // self.ranks * self.size
        total = self.bias(f"{name}.o.bias", self.width)
        for rank in range(self.ranks):
            if name.startswith("decoder") and name.endswith("SelfAttention"):
                block = self.load(f"{name}.qkv.weight.{rank}", self.width, 3, local)
                biases = self.bias(f"{name}.qkv.bias.{rank}", 3, 1, 1, local) if self.has_bias else [0.0] * 3
                q, k, v = (x @ block[:, part] + biases[part] for part in range(3))
            else:
                q, k, v = (
                    source @ self.load(f"{name}.{part}.weight.{rank}", self.width, local)
                    + self.bias(f"{name}.{part}.bias.{rank}", local)
                    for part, source in (("q", x), ("k", memory), ("v", memory))
                )
            k, v = k * self.ia3(f"{name}.k", rank, local), v * self.ia3(f"{name}.v", rank, local)
            q, k, v = (a.reshape(*a.shape[:2], -1, self.size).swapaxes(1, 2) for a in (q, k, v))
            scores = q @ k.swapaxes(-1, -2) * (self.size**-0.5 if self.has_bias else 1.0) + position_bias[rank] + mask
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            context = scores / scores.sum(-1, keepdims=True) @ v
            flat = context.swapaxes(1, 2).reshape(*x.shape[:2], local)
            total = total + flat @ self.load(f"{name}.o.weight.{rank}", local, self.width)
        return total

    def activate(self, x: Array) -> Array:
        if self.activation in ("relu", "gated-relu", "reglu"):
            return np.maximum(x, 0)
        if self.activation in ("silu", "gated-silu", "SiGLU"):
            return x / (1 + np.exp(-x))
        assert self.activation in ("gelu", "gated-gelu", "geglu")
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def feed_forward(self, x: Array, name: str) -> Array:
        local = self.inter // self.ranks
        total = self.bias(f"{name}.wo.bias", self.width)

        def up(part: str, rank: int) -> Array:
            weight = self.load(f"{name}.{part}.weight.{rank}", self.width, local)
            return x @ weight + self.bias(f"{name}.{part}.bias.{rank}", local)

        for rank in range(self.ranks):
            middle = self.activate(up("wi", rank))
            if self.is_gated:
                middle = middle * up("wi2", rank)
            middle = middle * self.ia3(name, rank, local)
            total = total + middle @ self.load(f"{name}.wo.weight.{rank}", local, self.width)
        return total

    def position_bias(self, side: str, length: int) -> list[Array]:
        local = self.heads // self.ranks
        if not self.is_relative:
            return [np.zeros((local, 1, 1), np.float32)] * self.ranks
        buckets = relative_buckets(length, length, self.positions, side == "encoder")
        name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return [self.load(f"{name}.{rank}", local, self.positions)[:, buckets] for rank in range(self.ranks)]

    def forward(self, encoder_ids: Array, decoder_ids: Array) -> Array:
        """Compute logits [batch, length, vocab] in fp32 for ids [batch, length] of both sides, nothing padded."""
        nothing = np.zeros((1, 1), np.float32)
        no_bias = [np.zeros((self.heads // self.ranks, 1, 1), np.float32)] * self.ranks
        memory = self.embed(encoder_ids)
        bias = self.position_bias("encoder", encoder_ids.shape[1])
        for layer in range(self.layers["encoder"]):
            block = f"encoder.block.{layer}.layer"
            y = self.norm(memory, f"{block}.0.layer_norm")
            memory = memory + self.attention(y, y, f"{block}.0.SelfAttention", nothing, bias)
            y = self.norm(memory, f"{block}.1.layer_norm")
            memory = memory + self.feed_forward(y, f"{block}.1.DenseReluDense")
        memory = self.norm(memory, "encoder.final_layer_norm")
        x, length = self.embed(decoder_ids), decoder_ids.shape[1]
        hidden_from = np.triu(np.full((length, length), -np.inf, np.float32), 1)
        bias = self.position_bias("decoder", length)
        for layer in range(self.layers["decoder"]):
            block = f"decoder.block.{layer}.layer"
            y = self.norm(x, f"{block}.0.layer_norm")
            x = x + self.attention(y, y, f"{block}.0.SelfAttention", hidden_from, bias)
            y = self.norm(x, f"{block}.1.layer_norm")
            x = x + self.attention(y, memory, f"{block}.1.EncDecAttention", nothing, no_bias)
            y = self.norm(x, f"{block}.2.layer_norm")
            x = x + self.feed_forward(y, f"{block}.2.DenseReluDense")
        x = self.norm(x, "decoder.final_layer_norm") * self.logit_scale
        head = "lm_head.weight" if (self.root / "lm_head.weight.bin").exists() else "shared.weight_T"
        return x @ self.load(head, self.vocab, self.width).T + self.bias("shared.bias", self.vocab)
