"""Load a checkpoint: read the weights, reserve the cache, and build the steps of this process."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from .cache.kv_cache import KvCache
from .cache.sizing import CacheShape, free_bytes
from .errors import EngineError
from .model.config import ModelConfig
from .model.families import read_config
from .model.layouts import ModelWeights, Partition
from .model.network import Network
from .model.precision import Precision, choose_device, choose_precision
from .model.prefixes import read_prefixes
from .model.weights import load_weights
from .ops.kernels import problem_on
from .ops.ops import Ops, choose_ops
from .parallel.comm import Comm
from .parallel.group import Group
from .parallel.steps import RankZeroSteps
from .parallel.workers import WorkerProcesses, needs_workers
from .settings import Settings
from .steps.steps import Steps
from .steps.threads import begin_thread, choose_threads
from .steps.warmup import warm_up

_log = logging.getLogger(__name__)
_SPARE_BYTES = 1 << 30  # of a GPU, for intermediate results of contexts and captured steps


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to generate.

    Attributes:
        steps: the network and its cache.
        description: model, device and precision in one line.
        threads: of torch on a CPU.
        group: the process group; None: there is only this process.
        workers: the processes of the group that this one has started; None: none.
    """

    steps: Steps
    description: str
    threads: int
    group: Group | None
    workers: WorkerProcesses | None

    def close(self) -> None:
        """Shut down, the other processes too."""
        self.steps.close()
        if self.workers:
            self.workers.wait()

    def abandon(self) -> None:
        """Kill the other processes and leave the group."""
        if self.workers:
            self.workers.kill()
        if self.group:
            self.group.close()


def load(settings: Settings, device: torch.device, group: Group | None = None) -> Loaded:
    """Load a checkpoint, start the worker processes if no launcher has, and warm up; see engine.open_engine."""
    workers = None
    with ExitStack() as undo:
        if group is None and needs_workers(settings, device):
            workers = WorkerProcesses(settings)
            undo.callback(workers.kill)
            group = Group(workers.ranks, device, settings, workers)
        if group:
            undo.callback(group.close)
        threads = choose_threads(settings.cpu_threads, group.ranks.local_size if group else 1)
        # libgomp keeps workers for each thread that computes. If there are more of them than cores, none spins at a
        # barrier: each operator takes two wake-ups, 60 us instead of 10. So loading has a thread that ends.
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


@dataclass(frozen=True)
class _Part:
    """This process's part of the checkpoint, and the seconds that reading it took."""

    config: ModelConfig
    precision: Precision
    partition: Partition
    weights: ModelWeights
    seconds: float


def load_steps(settings: Settings, device: torch.device | None = None, group: Group | None = None) -> tuple[Steps, str]:
    """Load this process's part of a checkpoint, and describe it in one line; see open_engine."""
    device = device or choose_device()
    begin_thread(choose_threads(settings.cpu_threads, group.ranks.local_size if group else 1), device)
    _check_kernels(settings, device)
    with torch.inference_mode():
        part = _read(settings, device, group)
        ops = choose_ops(device)
        comm = Comm(ops, part.config, part.weights.like, group)
        network = Network(part.config, part.weights, comm, ops)
        sizes = part.config, settings.tensor_para_size, part.precision, device, part.partition
        prefixes = read_prefixes(settings.checkpoint, *sizes)
        cache = _reserve_cache(settings, part, device, ops, group)
    description = _describe(settings, part, cache)
    if group:
        description += f"; rank {group.ranks.rank} of {group.ranks.world_size}, layers {part.partition.layers}"
        description += f", {comm.note}" if comm.is_split else ""
    _log.info(description)
    if group and group.ranks.rank == 0:
        return RankZeroSteps(network, cache, prefixes, group), description
    return Steps(network, cache, prefixes), description


def _read(settings: Settings, device: torch.device, group: Group | None) -> _Part:
    """Read this process's weights onto the device."""
    config = read_config(settings.checkpoint, settings.model_type)
    precision = choose_precision(settings.data_type, device, settings.int8_mode)
    start = time.perf_counter()
    partition = group.partition(config) if group else Partition(range(config.num_layer))
    source = settings.checkpoint, config, settings.tensor_para_size, precision, device, partition
    weights = load_weights(*source, _sharers(device, group), settings.has_made_up_weights)
    return _Part(config, precision, partition, weights, time.perf_counter() - start)


def _reserve_cache(settings: Settings, part: _Part, device: torch.device, ops: Ops, group: Group | None) -> KvCache:
    """Reserve the KV cache in the free memory: for the same number of tokens in all processes of a group."""
    config, decoder = part.config, part.weights.decoder
    heads = config.kv_heads // (1 if part.partition.rank is None else settings.tensor_para_size)
    shape = CacheShape(
        len(decoder.layers) if decoder else 0,
        heads,
        config.size_per_head,
        part.precision.compute,
        has_cross=config.encoder is not None,
        is_head_major=ops.is_head_major,
    )
    budget = choose_budget(settings, free_bytes(device) // _sharers(device, group), device)
    if group:  # a stage may have no layers
        token_bytes = max(shape.token_bytes, 1)
        budget = group.all_reduce_min(budget // token_bytes) * token_bytes
    longest = config.max_pos_seq_len + max((length for _, length in config.prompt_tasks), default=0)
    return KvCache(shape, device, budget, longest)


def _sharers(device: torch.device, group: Group | None) -> int:
    """Give the number of processes that use this device's memory."""
    return group.ranks.local_size if group and device.type == "cpu" else 1


def _describe(settings: Settings, part: _Part, cache: KvCache) -> str:
    """Describe the loaded model in one line, for a log."""
    config, weights, rank, shards = part.config, part.weights, part.partition.rank, settings.tensor_para_size
    what = f"{shards} shards" if rank is None else f"shard {rank} of {shards}"
    saved = f" ({weights.saved_bytes / 1e9:.3g} GB less than without int8)" if weights.saved_bytes else ""
    return (
        f"{settings.model_type} {config.num_layer} layers, hidden {config.hidden_units}, vocabulary {config.vocab_size}"
        f" from {settings.checkpoint} ({config.weight_data_type}, {what}) in {part.seconds:.1f} s;"
        f" {part.precision.note}; weights {weights.size_bytes / 1e9:.3g} GB{saved}, KV cache up to"
        f" {cache.budget_bytes / 1e9:.3g} GB ({cache.shape.token_bytes} bytes a token);"
        f" {torch.get_num_threads()} CPU threads"
    )


def _check_kernels(settings: Settings, device: torch.device) -> None:
    """Raise an EngineError if the kernels cannot be compiled for a GPU, unless the settings allow torch's kernels."""
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
    """Choose how many of the free bytes the cache may take.

    Raises:
        EngineError: kv_cache_bytes is more than a GPU, where all of it is reserved at once, has free.
    """
    usual = free // 2  # other processes of a host need memory too
    if device.type != "cpu":
        usual = max(usual, min(int(0.9 * free), free - _SPARE_BYTES))
    budget = settings.kv_cache_bytes or int(settings.kv_cache_fraction * free) or usual
    if device.type != "cpu" and budget > free:
        raise EngineError(f"kv_cache_bytes = {budget}: {device} has {free} bytes left beside the weights")
    return budget
