"""The engine: open a checkpoint, submit requests from any thread, be answered."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from .cache import CacheShape, KvCache, free_bytes
from .config import ModelConfig, read_config
from .crew import Crew, needs_crew
from .errors import EngineError, GroupLostError
from .group import Group
from .kernels import can_run_on
from .layouts import Share
from .network import Network
from .pages import Cache, PagedCache
from .parallel import Leader, ProcessLinks
from .precision import choose_device, choose_precision
from .prefixes import read_prefixes
from .prompts import read_prompt_tables
from .request import Array, Request, parse_request
from .scheduler import Scheduler
from .sequence import FAILED, INVALID, Answer, Job
from .settings import Settings
from .steps import Steps
from .warmup import warm_up
from .weights import load_weights

_log = logging.getLogger(__name__)
_CLOSED = "the engine was closed"
_SPARE_BYTES = 1 << 30  # of a GPU, for what contexts and captured steps work on


class Engine:
    """A loaded model, and the thread that generates.

    Args:
        steps: the network and its cache.
        settings: of the model.
        threads: that torch computes with on a CPU.
        description: what runs, where and how.
        max_rows: sequences in one step at most.
        prompts: see prompts.read_prompt_tables.
        crew: processes to end with this one.

    Attributes:
        config: dimensions.
        description: one line for a log.
    """

    def __init__(
        self,
        steps: Steps,
        settings: Settings,
        threads: int,
        description: str,
        max_rows: int,
        prompts: Sequence[Array] | None,
        crew: Crew | None = None,
    ) -> None:
        self.config: ModelConfig = steps.config
        self.description = description
        self._steps, self._prompts, self._crew = steps, prompts, crew
        self._scheduler = Scheduler(steps, max_rows, settings.has_inflight_batching, settings.session_idle_s)
        self._arrivals: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, args=(threads,), name="engine", daemon=True)
        self._thread.start()

    def parse(self, tensors: Mapping[str, Array]) -> Request:
        """Check one request; see request.parse_request."""
        return parse_request(tensors, self.config, self._prompts)

    def submit(
        self,
        request: Request,
        answer: Callable[[Answer], None],
        is_streaming: bool = False,
        is_cancelled: Callable[[], bool] | None = None,
        session: int | str | None = None,
    ) -> None:
        """Have a request answered, and return at once.

        Args:
            request: as parse gave it.
            answer: is called from the engine's thread, so it must be quick: once, or with is_streaming for every step
                in which the request gets tokens, with the output so far. Exactly one call has is_final, the last.
            is_streaming: see answer.
            is_cancelled: is asked at every step; once it says yes the request is given up, and answered with the code
                CANCELLED.
            session: key of the conversation that the request begins (START) or continues; see sessions.py.
        """
        if self._is_closed:
            raise EngineError(_CLOSED)
        self._arrivals.put(Job(request, answer, is_streaming, is_cancelled, session=session))

    def generate(self, requests: Sequence[Request]) -> list[dict[str, Array]]:
        """Answer several requests and wait for all.

        Returns:
            The output tensors of each; see sequence.output_tensors.

        Raises:
            EngineError: one of them failed.
        """
        answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
        for index, request in enumerate(requests):
            self.submit(request, lambda answer, index=index: answers.put((index, answer)))  # type: ignore[misc]
        found: dict[int, dict[str, Array]] = {}
        while len(found) < len(requests):
            index, answer = answers.get()
            if answer.tensors is None:
                raise EngineError(answer.problem or "no answer")
            found[index] = answer.tensors
        return [found[index] for index in range(len(requests))]

    def close(self) -> None:
        """Give up what is under way, and end the other processes of a group in good order."""
        if not self._is_closed:
            self._is_closed = True
            self._arrivals.put(None)
            self._thread.join()
            self._steps.close()
            if self._crew:
                self._crew.dismiss()

    def _run(self, threads: int) -> None:
        _begin_thread(threads, self._steps.device)
        while self._take_arrivals():
            try:
                if not self._scheduler.is_idle:
                    self._scheduler.step()
            except GroupLostError as error:
                _log.error("%s", error)
                self._scheduler.give_up(f"generation failed: {error}")
            except Exception as error:  # what the scheduler itself did not foresee
                _log.exception("the scheduler failed")
                self._scheduler.give_up(f"generation failed: {error}")
        self._scheduler.give_up(_CLOSED)
        while not self._arrivals.empty():
            if job := self._arrivals.get():
                job.answer(Answer(None, _CLOSED, code=FAILED))

    def _take_arrivals(self) -> bool:
        """Hand over what has come, and wait for it if there is nothing to do; false: it is time to end."""
        is_waiting = self._scheduler.is_idle
        while is_waiting or not self._arrivals.empty():
            try:
                job = self._arrivals.get(timeout=self._scheduler.sessions.patience_s)
            except queue.Empty:
                self._scheduler.sessions.expire()
                continue
            if job is None:
                return False
            try:
                self._scheduler.add(job)
            except Exception as error:
                _log.exception("a request was not taken")
                job.answer(Answer(None, f"generation failed: {error}", code=INVALID))
            is_waiting = False
        return True


def open_engine(
    settings: Settings, device: torch.device | None = None, group: Group | None = None, max_rows: int = 1024
) -> Engine:
    """Load a checkpoint and start.

    Args:
        settings: what to load and how to run it.
        device: None for a GPU where there is one, else the CPU.
        group: the processes that hold the network together, of which this is the first; None: the engine starts those
            that are needed, see crew.py.
        max_rows: sequences in one step at most.

    Raises:
        EngineError: config.ini or shards are not as they must be, or another process of the group was lost; the
            message names them.
    """
    device, crew = device or choose_device(), None
    with ExitStack() as undo:
        if group is None and needs_crew(settings, device):
            crew = Crew(settings)
            undo.callback(crew.kill)
            group = Group(crew.ranks, device, settings)
        if group:
            undo.callback(group.leave)
        threads = _choose_threads(settings, group)
        # libgomp keeps workers for each thread that computes. Once all of them are more than there are cores, none
        # spins at a barrier any more: each operator takes two wake-ups, 60 us where it took 10. So loading's end with
        # its thread.
        with ThreadPoolExecutor(1, "loading", _begin_thread, (threads, device)) as loading:
            steps, description = loading.submit(load_steps, settings, device, group).result()
            note = loading.submit(warm_up, steps).result()
        if note:
            description += f"; {note}"
            _log.info(note)
        prompts = read_prompt_tables(settings.checkpoint, steps.config)
        undo.pop_all()
    return Engine(steps, settings, threads, description, max_rows, prompts, crew)


def _begin_thread(threads: int, device: torch.device) -> None:
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape: 40 to 600 ms


def load_steps(settings: Settings, device: torch.device | None = None, group: Group | None = None) -> tuple[Steps, str]:
    """Load this process's part of a checkpoint, and describe it in one line; see open_engine."""
    local_size = group.ranks.local_size if group else 1
    torch.set_num_threads(_choose_threads(settings, group))
    device = device or choose_device()
    directory, tensor_para_size = settings.checkpoint, settings.tensor_para_size
    config = read_config(directory, settings.model_type)
    precision = choose_precision(settings.data_type, device, settings.int8_mode)
    start = time.perf_counter()
    share = group.share(config) if group else Share(range(config.num_layer))
    with torch.inference_mode():
        sharers = local_size if device.type == "cpu" else 1
        made_up = settings.has_made_up_weights
        weights = load_weights(directory, config, tensor_para_size, precision, device, share, sharers, made_up)
        seconds = time.perf_counter() - start
        network = Network(config, weights, ProcessLinks(group, config, precision.compute, device) if group else None)
        layers = len(weights.decoder.layers) if weights.decoder else 0
        heads = config.head_num // (1 if share.rank is None else tensor_para_size)
        shape = CacheShape(layers, heads, config.size_per_head, precision.compute, config.encoder is not None)
        prefixes = read_prefixes(directory, config, tensor_para_size, precision, device, share)
        cache = _open_cache(settings, config, shape, device, sharers, group)
    what = f"{tensor_para_size} shards" if share.rank is None else f"shard {share.rank} of {tensor_para_size}"
    saved = f" ({weights.saved_bytes / 1e9:.3g} GB less than without int8)" if weights.saved_bytes else ""
    description = (
        f"{settings.model_type} {config.num_layer} layers, hidden {config.hidden_units}, vocabulary {config.vocab_size}"
        f" from {directory} ({config.weight_data_type}, {what}) in {seconds:.1f} s; {precision.note};"
        f" weights {weights.size_bytes / 1e9:.3g} GB{saved}, KV cache up to {cache.budget_bytes / 1e9:.3g} GB"
        f" ({shape.token_bytes} bytes a token); {torch.get_num_threads()} CPU threads"
    )
    if group:
        description += f"; rank {group.ranks.rank} of {group.ranks.world_size}, layers {share.layers}"
    _log.info(description)
    if group and group.ranks.rank == 0:
        return Leader(network, cache, prefixes, group), description
    return Steps(network, cache, prefixes), description


def _open_cache(
    settings: Settings,
    config: ModelConfig,
    shape: CacheShape,
    device: torch.device,
    sharers: int,
    group: Group | None,
) -> Cache:
    """Open a cache for as many tokens as in every other process of a group."""
    budget = choose_budget(settings, free_bytes(device) // sharers, device)
    if group:
        shape_bytes = max(shape.token_bytes, 1)  # a stage may have no layers
        budget = group.agree(budget // shape_bytes) * shape_bytes
    if not can_run_on(device) or config.family == "t5-encoder":  # which keeps nothing
        return KvCache(shape, device, budget)
    longest = config.max_pos_seq_len + max((length for _, length in config.prompt_tasks), default=0)
    return PagedCache(shape, device, budget, longest)


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
