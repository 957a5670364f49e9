"""Run the engine's network over shards in the ways that a scheduler does, and give its logits."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_models import VOCAB
from torch import Tensor

from backends.fastertransformer.engine.attention.attention import Source
from backends.fastertransformer.engine.attention.cache import CacheShape, KvCache
from backends.fastertransformer.engine.checkpoint.config import read_config
from backends.fastertransformer.engine.checkpoint.weights import load_weights
from backends.fastertransformer.engine.network.network import Network
from backends.fastertransformer.engine.precision import Precision

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, torch.float32, "")


def some_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def open_network(directory: Path, tensor_para_size: int, model_type: str = "GPT") -> Network:
    config = read_config(directory, model_type)
    return Network(config, load_weights(directory, config, tensor_para_size, FP32, CPU))


def new_cache(
    network: Network, slots: int, capacity: int, window: int | None = None, cross_capacity: int = 0
) -> KvCache:
    config, has_cross = network.config, cross_capacity > 0
    shape = CacheShape(config.num_layer, config.head_num, config.size_per_head, torch.float32, has_cross)
    cache = KvCache(shape, CPU, 1 << 30)
    cache.reserve(slots, capacity, cross_capacity)
    for block in cache.memory + cache.cross_memory:
        block.fill_(1e4)  # what an earlier row left must not matter
    if window:
        cache.windows.fill_(window)
    return cache


@torch.inference_mode()
def prefill_logits(network: Network, ids: Tensor) -> Tensor:
    """[B, T] -> [B, T, V], all at once."""
    batch, length = ids.shape
    cache = new_cache(network, batch, length)
    lengths = torch.full((batch,), length)
    return network.logits(network.extend(ids, None, lengths, slice(0, batch), cache, length))


@torch.inference_mode()
def decode_logits(network: Network, ids: Tensor, first: int = 1) -> Tensor:
    """[B, T] -> [B, T - first, V]: all behind the first tokens one at a time, in slots out of order."""
    batch, length = ids.shape
    cache = new_cache(network, batch + 2, length)
    slots = torch.arange(batch).flip(0) + 1
    network.extend(ids[:, :first], None, torch.full((batch,), first), slots, cache, first)
    hidden = [
        network.decode(ids[:, step], torch.full((batch,), step), slots, cache, step + 1)
        for step in range(first, length)
    ]
    return network.logits(torch.stack(hidden, 1))


@torch.inference_mode()
def mixed_logits(network: Network, ids: Tensor, cuts: list[list[int]]) -> list[Tensor]:
    """Run rows in chunks, each row cut at its own places, [B, T] -> by row [last cut, V]; then a decode step of all."""
    batch, length = ids.shape
    cache = new_cache(network, batch, length)
    hidden: list[list[Tensor]] = [[] for _ in range(batch)]
    starts = [0] * batch
    for ends in zip(*cuts, strict=True):
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        chunk = torch.full((batch, max(lengths)), 1)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            chunk[row, : end - start] = ids[row, start:end]
        out = network.extend(chunk, torch.tensor(starts), torch.tensor(lengths), slice(0, batch), cache, max(ends))
        for row, count in enumerate(lengths):
            hidden[row].append(out[row, :count])
        starts = list(ends)
    positions = torch.tensor(starts)
    out = network.decode(ids[torch.arange(batch), positions], positions, slice(0, batch), cache, max(starts) + 1)
    return [network.logits(torch.cat([*parts, out[row : row + 1]])) for row, parts in enumerate(hidden)]


@torch.inference_mode()
def answers_logits(
    network: Network, inputs: Tensor, lengths: Tensor, ids: Tensor, first: int, tasks: Tensor | None = None
) -> Tensor:
    """Answer inputs [B, S] of those lengths with ids [B, T] -> [B, T, V]: ``first`` tokens at once, then one by one."""
    batch, length = ids.shape
    cache = new_cache(network, batch + 1, length, cross_capacity=inputs.shape[1] + 3)
    slots, source = slice(1, batch + 1), Source(lengths, int(lengths.max()), tasks)
    network.remember(network.encode(inputs, lengths, tasks), lengths, slots, cache, tasks)
    counts = torch.full((batch,), first)
    hidden = [network.extend(ids[:, :first], None, counts, slots, cache, first, source=source)]
    for step in range(first, length):
        positions = torch.full((batch,), step)
        hidden.append(network.decode(ids[:, step], positions, slots, cache, step + 1, source)[:, None])
    return network.logits(torch.cat(hidden, 1))
