"""Load a checkpoint: start the other processes, build the steps of this one, and warm them up."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from ft_format.weight_format import INT8, KEY

from .arrays import Array
from .errors import EngineError
from .model.draft_model import load_draft_model
from .model.eagle3 import Eagle3Head, load_eagle3
from .model.network import Network
from .model.precision import choose_device
from .model.predictor import Predictor, load_predictor
from .ops import choose_ops
from .ops.kernels import problem_on
from .parallel.comm import Comm
from .parallel.group import Group
from .parallel.workers import WorkerProcesses, needs_workers
from .part import Part
from .request.adapters import Adapters
from .request.prompts import read_prompt_tables
from .settings import Settings
from .steps.ranks import RankZeroSteps
from .steps.steps import Steps
from .steps.threads import begin_thread, choose_threads
from .steps.warmup import warm_up

_log = logging.getLogger(__name__)


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
        part = Part(settings, device, group)
        ops = choose_ops(device)
        config, like = part.config, part.weights.like
        comm = Comm(ops, like, vocab_size=config.vocab_size, width=config.hidden_units, group=group)
        network = Network(config, part.weights, comm, ops)
        prefixes, adapters = part.read_prefixes(), part.reserve_adapters()
        is_first = not group or group.rank == 0
        draft: Network | None = None
        if is_first:
            own = config.decoder, part.weights, device, ops, part.sharers, group is None
            draft = load_predictor(settings, *own) or load_eagle3(settings, *own)
            draft = draft or load_draft_model(settings, config, device, ops, part.sharers)
        if isinstance(draft, Eagle3Head):
            network.taps = draft.taps_of_model
        cache = part.reserve_cache(ops.is_head_major, draft)
        drafting = Steps(draft, cache.of_draft_model()) if draft else None
    description = part.describe(cache)
    if draft:
        kind = "a predictor of further tokens" if isinstance(draft, Predictor) else "a draft model"
        kind = "an EAGLE-3 head" if isinstance(draft, Eagle3Head) else kind
        description += f"; {kind} of {draft.weights.size_bytes / 1e9:.3g} GB"
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
