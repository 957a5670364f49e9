"""Load a checkpoint: this process's part of the network and its cache, together with the other processes of a group."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from .cache.kv_cache import KvCache
from .cache.sizing import CacheShape, free_bytes
from .errors import EngineError
from .model.config import read_config
from .model.layouts import Partition
from .model.network import Network
from .model.precision import choose_device, choose_precision
from .model.prefixes import read_prefixes
from .model.weights import load_weights
from .ops.base import choose_ops
from .ops.kernels import problem_on
from .parallel.comm import GroupComm
from .parallel.group import Group
from .parallel.steps import RankZeroSteps
from .parallel.workers import WorkerProcesses, needs_workers
from .settings import Settings
from .steps.steps import Steps
from .steps.warmup import warm_up

_log = logging.getLogger(__name__)
_SPARE_BYTES = 1 << 30  # of a GPU, for what contexts and captured steps work on


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to generate.

    Attributes:
        steps: the network and its cache.
        description: what runs, where and how, in one line.
        threads: that torch computes with on a CPU.
        group: of processes; None: there is only this one.
        workers: those of them that this one has started; None: none.
    """

    steps: Steps
    description: str
    threads: int
    group: Group | None
    workers: WorkerProcesses | None

    def close(self) -> None:
        """End in good order, the other processes too."""
        self.steps.close()
        if self.workers:
            self.workers.wait()

    def abandon(self) -> None:
        """End the other processes, whatever they do, and part from them."""
        if self.workers:
            self.workers.kill()
        if self.group:
            self.group.close()


def load(settings: Settings, device: torch.device, group: Group | None = None) -> Loaded:
    """Load a checkpoint, start the other processes if they are this one's to start, and warm up.

    Args:
        settings: what to load and how to run it.
        device: of this process.
        group: see engine.open_engine.

    Raises:
        EngineError: see there.
    """
    workers = None
    with ExitStack() as undo:
        if group is None and needs_workers(settings, device):
            workers = WorkerProcesses(settings)
            undo.callback(workers.kill)
            group = Group(workers.ranks, device, settings, workers)
        if group:
            undo.callback(group.close)
        threads = _choose_threads(settings, group)
        # libgomp keeps workers for each thread that computes. Once all of them are more than there are cores, none
        # spins at a barrier any more: each operator takes two wake-ups, 60 us where it took 10. So loading's end with
        # its thread.
        with ThreadPoolExecutor(1, "loading", begin_thread, (threads, device)) as loading:
            try:
                steps, description = loading.submit(load_steps, settings, device, group).result()
                note = loading.submit(warm_up, steps).result()
            except torch.OutOfMemoryError as error:
                raise EngineError(_out_of_memory(settings, device, error)) from None
        if note:
            description += f"; {note}"
            _log.info(note)
        if workers and group:
            group.survive_losses(workers)
        undo.pop_all()
    return Loaded(steps, description, threads, group, workers)


def _out_of_memory(settings: Settings, device: torch.device, error: torch.OutOfMemoryError) -> str:
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    return (
        f"{settings.checkpoint} does not fit into the memory of {device}: {str(error).splitlines()[0]} "
        f"{free / 1e9:.3g} of {total / 1e9:.3g} GB are free. End what else runs there (nvidia-smi lists it), give the "
        "KV cache less (kv_cache_fraction, kv_cache_bytes), use more GPUs (tensor_para_size) or int8_mode = 1"
    )


def begin_thread(threads: int, device: torch.device) -> None:
    """Prepare a thread that computes."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape: 40 to 600 ms


def load_steps(settings: Settings, device: torch.device | None = None, group: Group | None = None) -> tuple[Steps, str]:
    """Load this process's part of a checkpoint, and describe it in one line; see open_engine."""
    local_size = group.ranks.local_size if group else 1
    device = device or choose_device()
    begin_thread(_choose_threads(settings, group), device)
    _check_kernels(settings, device)
    directory, tensor_para_size = settings.checkpoint, settings.tensor_para_size
    config = read_config(directory, settings.model_type)
    precision = choose_precision(settings.data_type, device, settings.int8_mode)
    start = time.perf_counter()
    partition = group.partition(config) if group else Partition(range(config.num_layer))
    with torch.inference_mode():
        sharers = local_size if device.type == "cpu" else 1
        made_up = settings.has_made_up_weights
        weights = load_weights(directory, config, tensor_para_size, precision, device, partition, sharers, made_up)
        seconds = time.perf_counter() - start
        ops = choose_ops(device)
        comm = GroupComm(group, config, precision.compute, device, ops) if group else None
        network = Network(config, weights, comm, ops)
        layers = len(weights.decoder.layers) if weights.decoder else 0
        heads = config.head_num // (1 if partition.rank is None else tensor_para_size)
        has_cross = config.encoder is not None
        shape = CacheShape(layers, heads, config.size_per_head, precision.compute, has_cross, ops.is_head_major)
        prefixes = read_prefixes(directory, config, tensor_para_size, precision, device, partition)
        budget = choose_budget(settings, free_bytes(device) // sharers, device)
        if group:  # as many tokens as in every other process; a stage may have no layers
            budget = group.all_reduce_min(budget // max(shape.token_bytes, 1)) * max(shape.token_bytes, 1)
        longest = config.max_pos_seq_len + max((length for _, length in config.prompt_tasks), default=0)
        cache = KvCache(shape, device, budget, longest)
    what = f"{tensor_para_size} shards" if partition.rank is None else f"shard {partition.rank} of {tensor_para_size}"
    saved = f" ({weights.saved_bytes / 1e9:.3g} GB less than without int8)" if weights.saved_bytes else ""
    description = (
        f"{settings.model_type} {config.num_layer} layers, hidden {config.hidden_units}, vocabulary {config.vocab_size}"
        f" from {directory} ({config.weight_data_type}, {what}) in {seconds:.1f} s; {precision.note};"
        f" weights {weights.size_bytes / 1e9:.3g} GB{saved}, KV cache up to {cache.budget_bytes / 1e9:.3g} GB"
        f" ({shape.token_bytes} bytes a token); {torch.get_num_threads()} CPU threads"
    )
    if group and comm:
        description += f"; rank {group.ranks.rank} of {group.ranks.world_size}, layers {partition.layers}"
        description += f", {comm.note}" if comm.is_split else ""
    _log.info(description)
    if group and group.ranks.rank == 0:
        return RankZeroSteps(network, cache, prefixes, group), description
    return Steps(network, cache, prefixes), description


def _check_kernels(settings: Settings, device: torch.device) -> None:
    """Refuse a GPU for which the kernels cannot be compiled, unless its user goes on without them.

    Raises:
        EngineError: what is missing, and how to go on.
    """
    if not (problem := problem_on(device)):
        return
    advice = (
        "Triton needs a C compiler and Python's headers (Debian, Ubuntu: apt-get install gcc libc6-dev python3-dev)"
    )
    if not settings.allows_torch_kernels:
        raise EngineError(
            f"the GPU kernels cannot be compiled for {device}: {problem}; {advice}. To go on with torch's kernels, "
            "which take about six times as long, set torch_kernels = 1 in config.pbtxt, or SLIPWAY_TORCH_KERNELS=1 in "
            "the server's environment (deployment.torch_kernels=true)"
        )
    words = "the GPU kernels cannot be compiled for %s, so generation takes about six times as long: %s; %s"
    _log.error(words, device, problem, advice)


def choose_budget(settings: Settings, free: int, device: torch.device) -> int:
    """Decide how many bytes the cache may take of those that are free.

    Raises:
        EngineError: kv_cache_bytes is more than a GPU has left, where all of it is reserved at once.
    """
    usual = free // 2  # a host has other work
    if device.type != "cpu":
        usual = max(usual, min(int(0.9 * free), free - _SPARE_BYTES))
    budget = settings.kv_cache_bytes or int(settings.kv_cache_fraction * free) or usual
    if device.type != "cpu" and budget > free:
        raise EngineError(f"kv_cache_bytes = {budget}: {device} has {free} bytes left beside the weights")
    return budget


def _choose_threads(settings: Settings, group: Group | None) -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else torch.get_num_threads()
    return settings.cpu_threads or max(1, cores // (group.ranks.local_size if group else 1))
