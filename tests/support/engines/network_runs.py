"""Run the engine's network over shards in the ways that a scheduler does, and give its logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from backends.fastertransformer.engine.arrays import UNBOUNDED
from backends.fastertransformer.engine.cache.kv_cache import KvCache
from backends.fastertransformer.engine.cache.sizing import CacheShape
from backends.fastertransformer.engine.errors import WeightsError
from backends.fastertransformer.engine.model.config import ModelConfig
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.hub_experts import ExpertsReader
from backends.fastertransformer.engine.model.layouts import ModelWeights
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.precision import Precision
from backends.fastertransformer.engine.model.shards import mapped
from backends.fastertransformer.engine.model.weights import load_weights, read_model
from backends.fastertransformer.engine.ops.packed_rows import Rows
from backends.fastertransformer.engine.parallel.partition import Partition
from models.described import find_model_tensors
from models.fp8 import with_made_scales
from models.fused import places_of_parts
from support.engines.paged_steps import poisoned_states
from support.tiny_models.huggingface_models import VOCAB

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, torch.float32, "")


def some_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def open_network(directory: Path, tensor_para_size: int, model_type: str = "GPT") -> Network:
    config = read_config(directory, model_type)
    return Network(config, load_weights(directory, config, tensor_para_size, FP32, CPU))


def load_for_kernels(
    directory: Path, config: ModelConfig, ranks: int = 1, rank: int | None = None, precision: Precision = FP32
) -> ModelWeights:
    """Load a Hugging Face directory as a GPU has it: the experts of a layer are one tensor, and FP8 stays so."""
    assert config.decoder
    located = find_model_tensors(directory, config.decoder, WeightsError)
    if precision.quantization:
        located = with_made_scales(located, precision.quantization)
    located, precision = places_of_parts(config.decoder, located), replace(precision, keeps_fp8=True)
    reader = ExpertsReader(located, config, ranks, precision, CPU, False, rank, mapped(directory))
    return read_model(reader, config, Partition(range(config.num_layer), rank), has_head=config.head in located)


def new_cache(
    network: Network, slots: int, capacity: int, window: int | None = None, cross_capacity: int = 0
) -> KvCache:
    entries = network.weights.decoder.entries if network.weights.decoder else ()
    shape = CacheShape(entries, network.weights.like.dtype, has_cross=cross_capacity > 0)
    states = poisoned_states(network, slots) if network.config.keeps_states else None
    cache = KvCache(shape, CPU, 1 << 22, max(capacity, cross_capacity), states=states)
    for block in cache.kv:
        block.fill_(1e4)  # what an earlier row left must not matter
    rows = [cache.allocator.take(capacity, source=cross_capacity) for _ in range(slots)]
    cache.allocate(0, rows, np.full(slots, window or UNBOUNDED))
    return cache


def in_a_row(parts: list[Tensor], starts: list[int], slots: list[int]) -> Rows:
    """Put tokens of rows, [n] each, one behind the other."""
    lengths = [len(part) for part in parts]
    positions = [start + torch.arange(length) for start, length in zip(starts, lengths, strict=True)]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    of_rows = torch.tensor(slots).repeat_interleave(torch.tensor(lengths))
    return Rows(torch.cat(parts), torch.cat(positions), of_rows, ends, lengths)


@torch.inference_mode()
def prefill_logits(network: Network, ids: Tensor) -> Tensor:
    """[B, T] -> [B, T, V], all at once."""
    batch, length = ids.shape
    rows = in_a_row(list(ids), [0] * batch, list(range(batch)))
    return network.logits(network.extend(rows, new_cache(network, batch, length))).view(batch, length, -1)


@torch.inference_mode()
def decode_logits(network: Network, ids: Tensor, first: int = 1) -> Tensor:
    """[B, T] -> [B, T - first, V]: all behind the first tokens one at a time, in slots out of order."""
    batch, length = ids.shape
    cache = new_cache(network, batch + 2, length)
    slots = torch.arange(batch).flip(0) + 1
    network.extend(in_a_row(list(ids[:, :first]), [0] * batch, slots.tolist()), cache)
    hidden = [network.decode(ids[:, step], torch.full((batch,), step), slots, cache) for step in range(first, length)]
    return network.logits(torch.stack(hidden, 1))


@torch.inference_mode()
def mixed_logits(network: Network, ids: Tensor, cuts: list[list[int]]) -> list[Tensor]:
    """Run rows in chunks, each row cut at its own places, [B, T] -> by row [last cut, V]; then a decode step of all."""
    batch, length = ids.shape
    cache = new_cache(network, batch, length)
    hidden: list[list[Tensor]] = [[] for _ in range(batch)]
    starts = [0] * batch
    for ends in zip(*cuts, strict=True):
        parts = [row[start:end] for row, start, end in zip(ids, starts, ends, strict=True)]
        rows = in_a_row(parts, starts, list(range(batch)))
        out = network.extend(rows, cache, longest=max(ends) if any(starts) else 0)
        for row, states in enumerate(out.split([len(part) for part in parts])):
            hidden[row].append(states)
        starts = list(ends)
    positions = torch.tensor(starts)
    out = network.decode(ids[torch.arange(batch), positions], positions, slice(0, batch), cache)
    return [network.logits(torch.cat([*parts, out[row : row + 1]])) for row, parts in enumerate(hidden)]


def encoded_rows(
    network: Network, inputs: Tensor, lengths: Tensor, cache: KvCache, tasks: Tensor | None = None
) -> Tensor:
    """Run the encoder over inputs [B, S] of the slots from 1 on -> [T, hidden]."""
    slots = slice(1, len(inputs) + 1)
    cache.sources[0, slots] = lengths
    if tasks is not None:
        cache.sources[1, slots] = tasks
    parts = [row[:length] for row, length in zip(inputs, lengths.tolist(), strict=True)]
    return network.encode(in_a_row(parts, [0] * len(parts), list(range(1, len(inputs) + 1))), cache)


@torch.inference_mode()
def answers_logits(
    network: Network, inputs: Tensor, lengths: Tensor, ids: Tensor, first: int, tasks: Tensor | None = None
) -> Tensor:
    """Answer inputs [B, S] of those lengths with ids [B, T] -> [B, T, V]: ``first`` tokens at once, then one by one."""
    batch, length = ids.shape
    cache = new_cache(network, batch + 1, length, cross_capacity=inputs.shape[1] + 3)
    encoded_rows(network, inputs, lengths, cache, tasks)
    slots = list(range(1, batch + 1))
    hidden = [network.extend(in_a_row(list(ids[:, :first]), [0] * batch, slots), cache).view(batch, first, -1)]
    for step in range(first, length):
        positions = torch.full((batch,), step)
        hidden.append(network.decode(ids[:, step], positions, slice(1, batch + 1), cache)[:, None])
    return network.logits(torch.cat(hidden, 1))
