"""Load a checkpoint: read the weights, reserve the cache, and build the steps of this process."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from ft_format.weight_format import INT8, KEY
from models.peft import LARGEST_RANK, MOST_ADAPTERS, adapters_in, read_adapter

from .arrays import Array
from .cache.fp8_entries import shape_of
from .cache.kv_cache import KvCache
from .cache.sizing import CacheShape, free_bytes
from .cache.states import LEAST_STATES, States, bytes_of, choose_count
from .errors import EngineError, WeightsError
from .model.adapters import AdapterPlaces
from .model.draft_model import load_draft_model
from .model.families import read_config
from .model.network import Network
from .model.precision import choose_device, choose_precision
from .model.predictor import Predictor, load_predictor
from .model.prefixes import Prefix, read_prefixes
from .model.weights import load_weights
from .ops import choose_ops
from .ops.kernels import problem_on
from .parallel.comm import Comm
from .parallel.group import Group
from .parallel.partition import Partition
from .parallel.workers import WorkerProcesses, needs_workers
from .request.adapters import Adapters
from .request.prompts import read_prompt_tables
from .settings import Settings
from .steps.ranks import RankZeroSteps
from .steps.steps import Steps
from .steps.threads import begin_thread, choose_threads
from .steps.warmup import warm_up

_log = logging.getLogger(__name__)
_USUAL_RANK = 16  # of adapters that come later
_SPARE_BYTES = 1 << 30  # of a GPU, for intermediate results of contexts and captured steps


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to generate."""

    steps: Steps
    description: str  # model, device and precision in one line
    threads: int  # of torch on a CPU
    prompts: list[Array] | None  # see read_prompt_tables
    group: Group | None  # None: there is only this process
    workers: WorkerProcesses | None  # the processes of the group that this one has started

    def close(self) -> None:
        """Shut down, the other processes too."""
        self.steps.close()
        if self.workers:
            self.workers.wait()

    def abandon(self) -> None:
        """Kill the other processes and leave the group."""
        if self.workers:
            self.workers.kill()
        self.steps.release_graphs()
        if self.group:
            self.group.close()


def load(settings: Settings, device: torch.device, adapters: Adapters, group: Group | None = None) -> Loaded:
    """Load a checkpoint, start the worker processes if no launcher has, and warm up; see engine.open_engine."""
    workers = None
    with ExitStack() as undo:
        if group is None and needs_workers(settings, device):
            workers = WorkerProcesses(settings)
            undo.callback(workers.kill)
            group = Group(workers.ranks, device, settings, workers)
        if group:
            undo.callback(group.close)
        threads = _threads(settings, group)
        # libgomp keeps workers for each thread that computes. If there are more of them than cores, none spins at a
        # barrier: each operator takes two wake-ups, 60 us instead of 10. So loading has a thread that ends.
        with ThreadPoolExecutor(1, "loading", begin_thread, (threads, device)) as loading:
            try:
                steps, description = loading.submit(load_steps, settings, device, group).result()
                loading.submit(adapters.use, steps, steps.config.decoder, settings.checkpoint).result()
                note = loading.submit(warm_up, steps, mixed=settings.prefill_chunk_tokens).result()
                if steps.drafting:
                    loading.submit(warm_up, steps.drafting).result()
            except torch.OutOfMemoryError as error:
                raise EngineError(_out_of_memory(settings, device, error)) from None
        if note:
            description += f"; {note}"
            _log.info(note)
        prompts = read_prompt_tables(settings.checkpoint, steps.config)
        if workers and group:
            group.survive_losses(workers)
        undo.pop_all()
    return Loaded(steps, description, threads, prompts, group, workers)


def _threads(settings: Settings, group: Group | None) -> int:
    return choose_threads(settings.cpu_threads, group.ranks.local_size if group else 1)


def _out_of_memory(settings: Settings, device: torch.device, error: torch.OutOfMemoryError) -> str:
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    return (
        f"{settings.checkpoint} does not fit into the memory of {device}: {str(error).splitlines()[0]} "
        f"{free / 1e9:.3g} of {total / 1e9:.3g} GB are free. End what else runs there (nvidia-smi lists it), give the "
        f"KV cache less (kv_cache_fraction, kv_cache_bytes), use more GPUs (tensor_para_size) or {KEY} = {INT8.mode}"
    )


def load_steps(settings: Settings, device: torch.device | None = None, group: Group | None = None) -> tuple[Steps, str]:
    """Load this process's part of a checkpoint, and describe it in one line; see open_engine."""
    device = device or choose_device()
    begin_thread(_threads(settings, group), device)
    _check_kernels(settings, device)
    _check_rounding(settings, device)
    with torch.inference_mode():
        part = _Part(settings, device, group)
        ops = choose_ops(device)
        config, like = part.config, part.weights.like
        comm = Comm(ops, like, vocab_size=config.vocab_size, width=config.hidden_units, group=group)
        network = Network(config, part.weights, comm, ops)
        prefixes, adapters = part.read_prefixes(), part.reserve_adapters()
        is_first = not group or group.rank == 0
        draft: Network | None = None
        if is_first:
            own = config.decoder, part.weights, device, ops, part.sharers, group is None
            draft = load_predictor(settings, *own) or load_draft_model(settings, config, device, ops, part.sharers)
        cache = part.reserve_cache(ops.is_head_major, draft)
        drafting = Steps(draft, cache.of_draft_model()) if draft else None
    description = part.describe(cache)
    if draft:
        kind = "predictor of further tokens" if isinstance(draft, Predictor) else "draft model"
        description += f"; a {kind} of {draft.weights.size_bytes / 1e9:.3g} GB"
    if adapters:
        room = f"{adapters.count} adapters of rank {adapters.rank} at once, {adapters.size_bytes / 1e9:.3g} GB"
        description += f"; room for {room}"
    if group:
        description += f"; rank {group.rank} of {group.ranks.world_size}, layers {part.partition.layers}"
        description += f", {comm.note}" if comm.is_split else ""
    _log.info(description)
    if group and group.rank == 0:
        steps: Steps = RankZeroSteps(network, cache, prefixes, adapters, drafting, group)
    else:
        steps = Steps(network, cache, prefixes, adapters, drafting)
    _check_drafts(settings, steps)
    return steps, description


class _Part:
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
            output=(config.hidden_units if isinstance(draft, Predictor) else 0, self._precision.compute),
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


def _check_drafts(settings: Settings, steps: Steps) -> None:
    """Raise an EngineError if drafts are to be verified and the model cannot; see Steps.problem_with_drafts."""
    if settings.has_drafts and (problem := steps.problem_with_drafts):
        raise EngineError(f"speculation = {settings.speculation} with {settings.checkpoint}: {problem}; leave it out")


def _check_rounding(settings: Settings, device: torch.device) -> None:
    """Raise an EngineError if activations are to be rounded to FP8 and the device multiplies none."""
    if not settings.rounds_activations:
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise EngineError(f"fp8_activations = 1 needs a GPU of compute capability 8.9 or later, and {device} is none")
    _log.warning("activations of more than 16 rows are rounded to FP8 (fp8_activations = 1)")


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
