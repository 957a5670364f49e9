"""The test checkpoint in megatron-core's names, and NeMo's logits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from support.checkpoints.nemo_archive import HEAD_SIZE, HEADS, HIDDEN, INTER, LAYERS, NEMO, POSITIONS, VOCAB
from support.engines.network_runs import open_network, prefill_logits
from support.shards.reference_forward import forward

IDS = np.load(NEMO / "gpt122_tp1_pp1.input_ids.npy")
LOGITS = np.load(NEMO / "gpt122_tp1_pp1.logits.npy")
"""What NeMo computed for these ids; all samples hold the same weights."""


def run(source: Path, output: Path, ranks: int = 1) -> Path:
    convert(ConvertArguments(source, output, ranks, "fp32"))
    return output


def assert_nemos_logits(root: Path, ranks: int) -> None:
    assert np.abs(forward(root, IDS) - LOGITS).max() < 1e-4
    assert np.abs(prefill_logits(open_network(root, ranks), torch.from_numpy(IDS)).numpy() - LOGITS).max() < 1e-4


def cut(key: str, value: Any, ranks: int, rank: int) -> Any:
    if not isinstance(value, torch.Tensor) or "norm" in key or "position" in key:
        return value
    if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return value.chunk(ranks, 1)[rank].clone()
    if key.endswith(("linear_proj.bias", "linear_fc2.bias")):
        return value
    return value.chunk(ranks, 0)[rank].clone()


def core_state(groups: int = HEADS, has_bias: bool = True) -> dict[str, torch.Tensor]:
    """A tiny model with megatron-core's keys (local specification) and random weights."""
    generator = torch.Generator().manual_seed(groups)

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / 4

    state = {
        "embedding.word_embeddings.weight": fresh(VOCAB, HIDDEN),
        "embedding.position_embeddings.weight": fresh(POSITIONS, HIDDEN),
        "decoder.final_layernorm.weight": fresh(HIDDEN),
        "decoder.final_layernorm.bias": fresh(HIDDEN),
    }
    rows = (HEADS + 2 * groups) * HEAD_SIZE
    for layer in range(LAYERS):
        for name, out, size in (
            ("self_attention.linear_qkv", rows, HIDDEN),
            ("self_attention.linear_proj", HIDDEN, HIDDEN),
            ("mlp.linear_fc1", INTER, HIDDEN),
            ("mlp.linear_fc2", HIDDEN, INTER),
        ):
            state[f"decoder.layers.{layer}.{name}.weight"] = fresh(out, size)
            if has_bias:
                state[f"decoder.layers.{layer}.{name}.bias"] = fresh(out)
        for name in ("input_layernorm", "pre_mlp_layernorm"):
            state[f"decoder.layers.{layer}.{name}.weight"] = fresh(HIDDEN)
            state[f"decoder.layers.{layer}.{name}.bias"] = fresh(HIDDEN)
    return {f"model.{key}": value for key, value in state.items()}


def core_forward(
    state: dict[str, torch.Tensor],
    ids: np.ndarray,
    groups: int,
    norm_offset: float,
    turn: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    slopes: Sequence[float] = (0,) * HEADS,
    adapter: Callable[[np.ndarray, str], np.ndarray | float] = lambda x, name: 0,
) -> np.ndarray:
    """megatron-core's GPT, written from its own sources in float64: groups share keys and values.

    ``turn`` rotates queries and keys [batch, length, size]; ``slopes`` are ALiBi's, one a head; ``adapter`` gives
    what is added to a linear layer's output.
    """
    w = {key.removeprefix("model."): value.double().numpy() for key, value in state.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * (w[f"{name}.weight"] + norm_offset) + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0) + adapter(x, name)

    batch, length = ids.shape
    x = w["embedding.word_embeddings.weight"][ids]
    if "embedding.position_embeddings.weight" in w:
        x = x + w["embedding.position_embeddings.weight"][:length]
    for layer in range(LAYERS):
        base = f"decoder.layers.{layer}."
        mixed = linear(norm(x, f"{base}input_layernorm"), f"{base}self_attention.linear_qkv")
        mixed = mixed.reshape(batch, length, groups, HEADS // groups + 2, HEAD_SIZE)
        context = np.zeros((batch, length, HEADS, HEAD_SIZE))
        for head in range(HEADS):
            group, within = divmod(head, HEADS // groups)
            q, k, v = (mixed[:, :, group, place] for place in (within, -2, -1))
            scores = turn(q) @ turn(k).swapaxes(1, 2) / np.sqrt(q.shape[-1])
            scores = scores + np.triu(np.full((length, length), -np.inf), 1) + slopes[head] * np.arange(length)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            context[:, :, head] = scores / scores.sum(-1, keepdims=True) @ v
        x = x + linear(context.reshape(batch, length, HIDDEN), f"{base}self_attention.linear_proj")
        z = linear(norm(x, f"{base}pre_mlp_layernorm"), f"{base}mlp.linear_fc1")
        z = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        x = x + linear(z, f"{base}mlp.linear_fc2")
    head_weight = w.get("output_layer.weight", w["embedding.word_embeddings.weight"])
    return norm(x, "decoder.final_layernorm") @ head_weight.T
