"""The engine's network one stage at a time: the embedding, a layer, the head; only its weights are in memory.

The stages are those of pipeline parallelism, one behind the other in one process, so that no second description of a
model is needed: what an architecture is, the engine reads and computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from backends.fastertransformer.engine.arrays import MOST_SLOTS
from backends.fastertransformer.engine.cache.kv_cache import PAGE, KvCache
from backends.fastertransformer.engine.cache.page_allocator import pages_of
from backends.fastertransformer.engine.cache.sizing import CacheShape
from backends.fastertransformer.engine.cache.states import States
from backends.fastertransformer.engine.model.config import ModelConfig
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.precision import TORCH_TYPES, Precision, choose_device
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.ops import choose_ops
from backends.fastertransformer.engine.ops.packed_rows import NumberedRows
from backends.fastertransformer.engine.parallel.comm import Comm
from backends.fastertransformer.engine.parallel.partition import Partition
from ft_format.weight_format import NONE, WeightFormat

Ids = tuple[int, ...]
_WEIGHTS, _EXPERTS = (".bin", ".safetensors"), ".experts."
BATCH_TOKENS = 2048  # that a stage computes at once


@dataclass(frozen=True)
class Numbers:
    """Number formats of a computation.

    Attributes:
        data_type: fp32, fp16 or bf16: to which weights are rounded, and in which is computed, on a CPU too.
        weights: format of the layers' matrices.
        stored: to which weights are rounded where it is another; empty: it is not.
        exact: to which those few are rounded that are read in fp32 in any format.
        quantization: of export_scripts, that the checkpoint goes through before; empty: none.
    """

    data_type: str = "fp32"
    weights: WeightFormat = NONE
    stored: str = ""
    quantization: str = ""
    exact: str = "fp32"

    def __str__(self) -> str:
        """Return what a report calls them."""
        weights = " and ".join(each for each in (self.weights.name, self.quantization) if each)
        return f"{self.data_type}{f' with {weights} weights' if weights else ''}"


class LayeredModel:
    """A directory that the engine serves, whose stages are opened one after another.

    Args:
        directory: of shards, or of Hugging Face's.
        model_type: config.pbtxt's, for shards.
        numbers: formats to compute in.
        device: None: a GPU if there is one.

    Attributes:
        config: of the whole network.
        stages: the part of the network in each, in order.
        dtype: that is computed in.
    """

    def __init__(
        self, directory: Path, model_type: str, numbers: Numbers | None = None, device: torch.device | None = None
    ) -> None:
        self.directory, self.numbers = directory, numbers or Numbers()
        self.device, self.dtype = device or choose_device(), TORCH_TYPES[self.numbers.data_type]
        self.config: ModelConfig = read_config(directory, model_type)
        layers = [Partition(range(n, n + 1), None, False, False) for n in range(self.config.num_layer)]
        self.stages = [Partition(range(0), None, True, False), *layers, Partition(range(0), None, False, True)]

    def open(self, number: int, rows: Sequence[Ids]) -> Stage:
        """Load a stage's weights, with room for batches of these rows.

        Raises:
            WeightsError: weights are missing or damaged, or the stage does not fit into memory.
        """
        numbers = self.numbers
        rounded = TORCH_TYPES[numbers.stored or numbers.data_type]
        exact, note = TORCH_TYPES[numbers.exact], f"{numbers} on {self.device}"
        precision = Precision(rounded, self.dtype, note, numbers.weights, exact=exact)
        return Stage(self, self.stages[number], precision, rows)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files of weights."""
        return sum(each.stat().st_size for each in self.directory.iterdir() if each.suffix in _WEIGHTS)

    @property
    def used_numbers(self) -> float:
        """Numbers of the matrices that a token is multiplied with; of the experts, those that it uses."""
        config, total = self.config, 0.0
        mixture = config.decoder.mixture if config.decoder else None
        share = mixture.experts_per_token / mixture.expert_num if mixture else 1.0
        for name, tensor in config.tensors.items():
            if config.layout and name != config.layout.embedding:
                total += prod(tensor.shape) * (share if _EXPERTS in name else 1.0)
        return total


class _Relay(Comm):
    """Gives a stage what the stage before has left, in place of what a process would receive."""

    given: Tensor | None = None

    def recv_input(self, embed: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Return the input of this stage; see Comm."""
        return embed() if self.given is None else self.given


class Stage:
    """One stage with its weights."""

    def __init__(self, model: LayeredModel, partition: Partition, precision: Precision, rows: Sequence[Ids]) -> None:
        config, self._device = model.config, model.device
        with torch.inference_mode():
            weights = load_weights(
                model.directory, config, config.tensor_para_size or 1, precision, model.device, partition
            )
            ops = choose_ops(model.device)
            self._relay = _Relay(ops, weights.like, vocab_size=config.vocab_size, width=config.hidden_units)
            self._network = Network(config, weights, self._relay, ops)
            assert weights.decoder, "it is a decoder"
            shape = CacheShape(weights.decoder.entries, precision.compute, is_head_major=ops.is_head_major)
            batches = list(in_batches(rows))
            most_rows, longest = max(map(len, batches)), max(map(len, rows))
            pages = max(sum(pages_of(len(row)) for row in batch) for batch in batches) + 2
            states = States(weights.decoder.states, most_rows + 1, model.device) if config.keeps_states else None
            budget = pages * PAGE * max(1, shape.token_bytes)
            self._cache = KvCache(shape, model.device, budget, longest, keeps_prefixes=False, states=states)

    @torch.inference_mode()
    def run(self, rows: Sequence[Ids], hidden: Tensor | None) -> Tensor:
        """Run rows from their first token on.

        Args:
            rows: token ids.
            hidden: [T, hidden] behind the stage before, which is not overwritten; None: tokens are embedded.

        Returns:
            fp32 [T, hidden].
        """
        like = self._network.weights.like
        self._relay.given = None if hidden is None else hidden.to(like.device, like.dtype, copy=True)[None]
        lengths = np.array(list(map(len, rows)))
        cache = self._cache
        taken = [cache.allocator.take(len(row)) for row in rows]
        cache.allocate(0, taken)
        numbered = NumberedRows.of(np.concatenate(list(map(np.array, rows))), np.zeros_like(lengths), lengths, 0)
        found = self._network.extend(numbered.on(self._device), cache)
        nothing = np.array([], np.int64)
        cache.free(len(rows), 0, nothing, nothing)
        cache.allocator.release(taken)
        return found.float()

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [N, hidden] -> fp32 [N, V]."""
        like = self._network.weights.like
        return self._network.logits(hidden.to(like.device, like.dtype))


def in_batches(rows: Sequence[Ids]) -> list[list[Ids]]:
    """Cut rows into batches of at most ``BATCH_TOKENS`` tokens together, or of one row that is longer."""
    batches: list[list[Ids]] = []
    count = BATCH_TOKENS
    for row in rows:
        if count + len(row) > BATCH_TOKENS or len(batches[-1]) == MOST_SLOTS:
            batches.append([])
            count = 0
        batches[-1].append(row)
        count += len(row)
    return batches
