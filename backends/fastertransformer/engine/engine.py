"""The engine: open a checkpoint, submit requests from any thread, be answered."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path

import torch

from .arrays import Array
from .compiling import CLOSED, Compiling
from .errors import EngineError, GroupLostError
from .grammar.compiled import Grammars
from .grammar.library import large_stacks
from .loading import Loaded, load
from .model.config import ModelConfig
from .model.precision import choose_device
from .parallel.group import Group
from .request.adapters import Adapters, listed
from .request.parse import Request, parse_request
from .rows.answer import Answer, Failure, Tensors
from .rows.sequence import Job
from .scheduling.arrivals import Arrivals, Source, Unparsed
from .scheduling.metrics import EngineMetrics
from .scheduling.scheduler import Scheduler
from .scheduling.sessions import Session
from .scheduling.waiting import QueueLimits
from .settings import Settings
from .steps.threads import begin_thread

_log = logging.getLogger(__name__)
_LOAD_ATTEMPTS, _PAUSE_S = 3, 5.0  # after worker processes were lost


class Engine:
    """A loaded model, and the thread that generates; open_engine makes one.

    Attributes:
        config: the model's dimensions.
        description: of the model and how it runs.
        metrics: counts requests, tokens and times.
        pages: of the KV cache.
        places: of LoRA adapters on the device.
    """

    def __init__(self, loaded: Loaded, settings: Settings, adapters: Adapters, max_rows: int) -> None:
        self.config: ModelConfig = loaded.steps.config
        self._settings, self._max_rows, self._prompts = settings, max_rows, loaded.prompts
        self._device, self._adapters = loaded.steps.device, adapters
        self._arrivals = Arrivals()
        self._is_closed = False
        self._sessions: dict[int | str, Session] = {}
        self._grammars = Grammars(settings.checkpoint, self.config.vocab_size)
        self._compiling = Compiling(self._grammars, self._arrivals.put)
        self.metrics = EngineMetrics(loaded.steps.config.max_pos_seq_len, draft_tokens=settings.max_speculative_tokens)
        self._use(loaded)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        with large_stacks():  # it follows grammars
            self._thread.start()

    def _use(self, loaded: Loaded) -> None:
        """Generate with a loaded model from now on."""
        self._loaded, self._steps, self.description = loaded, loaded.steps, loaded.description
        self.pages, self.places = loaded.steps.cache.allocator.count, loaded.steps.places
        settings = self._settings
        self._scheduler = Scheduler(
            loaded.steps,
            self._max_rows,
            is_inflight=settings.has_inflight_batching,
            session_idle_s=settings.session_idle_s,
            known_sessions=self._sessions,
            limits=QueueLimits(settings.max_queue_length, settings.max_queue_s),
            metrics=self.metrics,
            chunk_tokens=settings.prefill_chunk_tokens,
            drafts=(settings.max_speculative_tokens, settings.has_drafts),
        )
        if loaded.group:
            loaded.group.control.at_loss.append(self._arrivals.wake)
        # A collection that looks through all that torch and the model consist of stops the steps for some 100 ms.
        gc.freeze()

    def parse(self, tensors: Mapping[str, Array]) -> Request:
        """Check one request; see request.parse_request."""
        return parse_request(tensors, self.config, self._prompts, self._adapters)

    def adapters(self) -> dict[str, dict[str, str | int]]:
        """Describe the LoRA adapters that requests may name: by name their directory ("path"), and their "rank"."""
        return listed(dict(self._adapters.known))

    def load_adapter(self, name: str, path: Path) -> None:
        """Load a LoRA adapter, while requests run; any thread but the engine's own may call it.

        Raises:
            EngineError: the name is taken, or the adapter is damaged, does not fit, or has a larger rank than
                max_adapter_rank.
        """
        self._adapters.load(name, path, self._between_steps)

    def unload_adapter(self, name: str) -> None:
        """Refuse an adapter to new requests; rows that have it end well. See load_adapter.

        Raises:
            EngineError: there is none of this name.
        """
        self._between_steps(lambda: self._adapters.unload(name))

    def _between_steps(self, change: Callable[[], None]) -> None:
        """Have the engine's thread make a change between two steps, and wait for it."""
        made = Future[None]()

        def make() -> None:
            try:
                with torch.inference_mode():
                    change()
                made.set_result(None)
            except Exception as error:
                made.set_exception(error)

        self._arrivals.announce(Unparsed([make]))
        while not made.done() and self._thread.is_alive():
            wait([made], timeout=1.0)
        if not made.done():
            raise EngineError(CLOSED)
        made.result()

    def submit(
        self,
        request: Request,
        answer: Callable[[Answer], None],
        is_streaming: bool = False,
        is_cancelled: Callable[[], bool] | None = None,
        session: int | str | None = None,
        arrived_s: float | None = None,
        is_behind: Callable[[], bool] | None = None,
        wants_tokens_alone: bool = False,
        name: str = "",
    ) -> None:
        """Submit a parsed request, and return at once.

        Args:
            request: to answer.
            answer: is called from the engine's thread, so it must be quick: once, or with is_streaming after every
                step in which the request gets tokens, with the output so far. Only the last call has is_final.
            is_streaming: see answer.
            is_cancelled: is called at every step; once it returns true the request ends with the code CANCELLED.
            session: key of the session that the request begins (START) or continues; see sessions.py.
            arrived_s: of time.monotonic, from which the request's times are counted; None: now.
            is_behind: is called before an answer that is not the last; while it returns true that answer is left out.
            wants_tokens_alone: whether answers have the generated tokens and nothing more: of a request with one row
                and one beam. A token of a stream then takes the least time.
            name: the client's; see Job.client.
        """
        if self._is_closed:
            raise EngineError(CLOSED)
        job = Job(request, answer, is_streaming, is_cancelled, is_behind, session, wants_tokens_alone, name=name)
        job.submitted_s = job.submitted_s if arrived_s is None else arrived_s
        if request.has_guides:
            self._compiling.submit(job)
        else:
            self._arrivals.put(job)

    def announce(self, source: Source) -> None:
        """Have the engine's thread submit the requests that wait in a source, between two steps."""
        self._arrivals.announce(source)

    def generate(self, requests: Iterable[Request]) -> list[Mapping[str, Array]]:
        """Answer several requests, each one as soon as it is given, and wait for all.

        Returns:
            The output tensors of each, see outputs.output_tensors.

        Raises:
            EngineError: one of them failed.
        """
        futures: list[Future[Answer]] = []
        for request in requests:
            futures.append(Future())
            self.submit(request, futures[-1].set_result)
        found: list[Mapping[str, Array]] = []
        for answer in [future.result() for future in futures]:
            if not isinstance(answer, Tensors):
                raise EngineError(answer.problem if isinstance(answer, Failure) else "no tensors were asked for")
            found.append(answer.tensors)
        return found

    def close(self) -> None:
        """End running requests with an error, shut the worker processes down, and free all memory."""
        if not self._is_closed:
            self._compiling.close()  # what was compiled arrives, and is answered when the thread ends
            self._is_closed = True
            self._arrivals.wake()
            self._thread.join()
            self._loaded.close()
            self._adapters.leave_steps()
            del self._scheduler, self._loaded, self._steps
            self._sessions.clear()
            self._free_memory()

    def _run(self) -> None:
        begin_thread(self._loaded.threads, self._device)
        while True:
            self._arrivals.take(self._scheduler)
            if self._is_closed:
                break
            problem = ""
            try:
                self._steps.raise_if_rank_lost()
                if not self._scheduler.is_idle:
                    self._scheduler.step()
            except GroupLostError as error:
                problem = f"generation failed: {error}"
            except Exception as error:  # a defect of the scheduler itself
                _log.exception("the scheduler failed")
                self._scheduler.give_up(f"generation failed: {error}")
            if problem:  # outside the handler: the exception refers to memory that is to be freed
                self._restart(problem)
        self._scheduler.give_up(CLOSED)
        for job in self._arrivals.drain():
            job.answer(Failure(CLOSED))

    def _restart(self, problem: str) -> None:
        """Fail requests that have begun; restart the workers if this process started them, and serve those that wait.

        If a launcher has started the workers, this process exits soon; see parallel/control.py.
        """
        _log.error("%s", problem)
        waiting = self._scheduler.give_up(problem, only_begun=self._loaded.workers is not None)
        if not self._loaded.workers:
            return
        self._loaded.abandon()
        self._adapters.leave_steps()
        del self._scheduler, self._loaded, self._steps
        if loaded := self._reload():
            self._use(loaded)
            _log.warning("restarted the worker processes; continuing with %d waiting requests", len(waiting))
            for job in waiting:
                self._scheduler.add(job)
            return
        for job in waiting:
            job.answer(Failure(problem))
        _log.critical("could not restart the worker processes after %d attempts; exiting", _LOAD_ATTEMPTS)
        os._exit(1)

    def _reload(self) -> Loaded | None:
        """Load the model again; None: every attempt has failed."""
        for attempt in range(1, _LOAD_ATTEMPTS + 1):
            self._free_memory()
            try:
                return load(self._settings, self._device, self._adapters)
            except EngineError as error:
                _log.error("reloading failed (attempt %d of %d): %s", attempt, _LOAD_ATTEMPTS, error)
                time.sleep(_PAUSE_S)
        return None

    def _free_memory(self) -> None:
        """Free memory that nothing refers to; reference cycles keep some of it until they are collected."""
        gc.unfreeze()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def open_engine(
    settings: Settings, device: torch.device | None = None, group: Group | None = None, max_rows: int = 1024
) -> Engine:
    """Load a checkpoint and start, by default on a GPU if there is one; a step has ``max_rows`` sequences at most.

    ``group`` is the process group that holds the network, of which this is rank 0; without one the engine starts the
    worker processes that it needs, see parallel/workers.py.

    Raises:
        EngineError: config.ini or shards are malformed, or another rank was lost; the message names them.
    """
    device = device or choose_device()
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    adapters = Adapters()
    return Engine(load(settings, device, adapters, group), settings, adapters, max_rows)
