"""This process's part of a checkpoint: its weights, and what it reserves of the device's memory beside them."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from models.peft import LARGEST_RANK, MOST_ADAPTERS, adapters_in, read_adapter

from .cache.fp8_entries import shape_of
from .cache.kv_cache import KvCache
from .cache.sizing import CacheShape, free_bytes
from .cache.states import LEAST_STATES, States, bytes_of, choose_count
from .errors import EngineError, WeightsError
from .model.adapters import AdapterPlaces
from .model.families import read_config
from .model.network import Network
from .model.precision import choose_precision
from .model.predictor import Predictor
from .model.prefixes import Prefix, read_prefixes
from .model.weights import load_weights
from .parallel.group import Group
from .parallel.partition import Partition
from .settings import Settings

_USUAL_RANK = 16  # of adapters that come later
_SPARE_BYTES = 1 << 30  # of a GPU, for intermediate results of contexts and captured steps


class Part:
    """This process's part of a checkpoint, whose weights are read onto the device."""

    def __init__(self, settings: Settings, device: torch.device, group: Group | None) -> None:
        self._settings, self._device, self._group = settings, device, group
        ranks = settings.tensor_para_size if group else 1
        config = read_config(settings.checkpoint, settings.model_type, ranks)
        self.config = config = replace(config, has_expert_parallel=settings.has_expert_parallel)
        precision = choose_precision(settings.data_type, device, settings.weights)
        if settings.quantization:
            precision = replace(precision, note=f"{precision.note}, matrices become {settings.quantization}")
        self._precision = replace(
            precision, rounds_activations=settings.rounds_activations, quantization=settings.quantization
        )
        encoder_layers = config.encoder.num_layer if config.encoder else 0
        whole = Partition(range(config.num_layer))
        self.partition = group.partition(config.num_layer, encoder_layers) if group else whole
        self.sharers = group.ranks.local_size if group and device.type == "cpu" else 1  # of the device's memory
        start = time.perf_counter()
        self.weights = load_weights(
            settings.checkpoint,
            config,
            settings.tensor_para_size,
            self._precision,
            device,
            self.partition,
            sharers=self.sharers,
            are_made_up=settings.has_made_up_weights,
        )
        self._seconds = time.perf_counter() - start

    def read_prefixes(self) -> list[Prefix]:
        """Read this process's part of every task's prefix prompt."""
        settings, ranks = self._settings, self._settings.tensor_para_size
        return read_prefixes(settings.checkpoint, self.config, ranks, self._precision, self._device, self.partition)

    def reserve_adapters(self) -> AdapterPlaces | None:
        """Reserve the places of adapters on the device; None: rows cannot have any.

        Raises:
            EngineError: the model cannot have adapters, or there are to be more, or of a larger rank, than are served.
        """
        settings, decoder = self._settings, self.config.decoder
        found = adapters_in(settings.checkpoint)
        count = min(len(found), MOST_ADAPTERS) if settings.max_adapters is None else settings.max_adapters
        if not count:
            return None
        if not decoder:
            raise EngineError(
                f"{settings.checkpoint} has no config.json of a decoder, and adapters are for such models"
            )
        rank = settings.max_adapter_rank
        if rank is None:
            every = [update for path in found.values() for update in read_adapter(path, decoder, WeightsError).values()]
            rank = max((update.rank for update in every), default=_USUAL_RANK)
        if count > MOST_ADAPTERS or rank > LARGEST_RANK:
            raise EngineError(
                f"max_adapters = {count} of max_adapter_rank = {rank}: the most are {MOST_ADAPTERS} of {LARGEST_RANK}"
            )
        return AdapterPlaces(self.weights.matrices, decoder, count, rank, self.weights.like)

    def reserve_cache(self, is_head_major: bool, draft: Network | None = None) -> KvCache:
        """Reserve the KV cache in the free memory: for the same number of tokens in all processes of a group.

        A draft model keeps its keys and values there too, and needs all of a row, whatever the model's windows are.
        """
        beside = draft.weights.decoder.entries if draft and draft.weights.decoder else ()
        config, decoder = self.config, self.weights.decoder
        shape = CacheShape(
            decoder.entries if decoder else (),
            self._precision.compute,
            has_cross=config.encoder is not None,
            is_head_major=is_head_major,
            beside=beside,
            output=(draft.config.hidden_units if isinstance(draft, Predictor) else 0, self._precision.compute),
        )
        if self._settings.has_fp8_cache:
            shape = self._as_fp8(shape)
        budget = choose_budget(self._settings, free_bytes(self._device) // self.sharers, self._device)
        states = self._reserve_states(budget) if config.keeps_states else None
        budget -= states.size_bytes if states else 0
        if self._group:  # a stage may have no layers
            token_bytes = max(shape.token_bytes, 1)
            budget = self._group.all_reduce_min(budget // token_bytes) * token_bytes
        longest = config.max_pos_seq_len + max((length for _, length in config.prompt_tasks), default=0)
        reach = 0 if beside else config.reach
        return KvCache(shape, self._device, budget, longest, self._settings.has_prefix_cache, reach, states)

    def _as_fp8(self, shape: CacheShape) -> CacheShape:
        """Return the dimensions of a cache that keeps as FP8 what another keeps as numbers.

        Raises:
            EngineError: of latent vectors.
        """
        if any(entry.parts == 1 for entry in (*shape.layers, *shape.beside)):
            raise EngineError(
                f"kv_cache_dtype = fp8 with {self._settings.checkpoint}, whose attention keeps latent vectors: these"
                " are as wide as they are computed with"
            )
        return shape_of(shape)

    def _reserve_states(self, budget: int) -> States:
        """Reserve the states of rows, in a part of the cache's memory: of as many rows in all processes of a group.

        Raises:
            EngineError: there is room for one row at most.
        """
        shapes = self.weights.decoder.states if self.weights.decoder else ()
        count = choose_count(shapes, budget, self._settings.has_prefix_cache)
        count = self._group.all_reduce_min(count) if self._group else count
        if count < LEAST_STATES:
            raise EngineError(
                f"{self._settings.checkpoint}: a row of it has a state of {bytes_of(shapes)} bytes, and the cache has"
                f" {budget} bytes for {LEAST_STATES} of them and as much for keys and values; give it more"
                " (kv_cache_bytes, kv_cache_fraction)"
            )
        return States(shapes, count, self._device)

    def describe(self, cache: KvCache) -> str:
        """Describe the loaded model in one line, for a log."""
        settings, config, weights, rank = self._settings, self.config, self.weights, self.partition.rank
        shards = settings.tensor_para_size
        what = f"{shards} shards" if rank is None else f"shard {rank} of {shards}"
        saved = f" ({weights.saved_bytes / 1e9:.3g} GB less than without int8)" if weights.saved_bytes else ""
        states = f", {cache.states.count} states of {cache.states.row_bytes} bytes" if cache.states else ""
        return (
            f"{settings.model_type} {config.num_layer} layers, hidden {config.hidden_units}, vocabulary"
            f" {config.vocab_size} from {settings.checkpoint} ({config.weight_data_type}, {what}) in"
            f" {self._seconds:.1f} s; {self._precision.note}; weights {weights.size_bytes / 1e9:.3g} GB{saved},"
            f" KV cache up to {cache.budget_bytes / 1e9:.3g} GB ({cache.shape.token_bytes} bytes a token){states};"
            f" {torch.get_num_threads()} CPU threads"
        )


def choose_budget(settings: Settings, free: int, device: torch.device) -> int:
    """Choose how many of the free bytes the cache may take.

    Raises:
        EngineError: kv_cache_bytes is more than a GPU has free, where all of it is reserved at once.
    """
    usual = free // 2  # other processes of a host need memory too
    if device.type != "cpu":
        usual = max(usual, min(int(0.9 * free), free - _SPARE_BYTES))
    budget = settings.kv_cache_bytes or int(settings.kv_cache_fraction * free) or usual
    if device.type != "cpu" and budget > free:
        raise EngineError(f"kv_cache_bytes = {budget}: {device} has {free} bytes left beside the weights")
    return budget
