"""The drop-in engine's side of benchmarks.peers.compare, which starts this in a process of its own.

    python3 -m benchmarks.peers.slipway --job=job.json

The engine is asked as its endpoint asks it, with in-flight batching and the prefix cache: its thread parses requests
between its steps. A static request is one of several rows.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from backends.fastertransformer.engine.arrays import Array
from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.errors import RequestError
from backends.fastertransformer.engine.rows.answer import Answer, Failure, Tensors
from backends.fastertransformer.engine.scheduling.arrivals import Unparsed
from backends.fastertransformer.engine.settings import Settings
from benchmarks.engine import generate
from benchmarks.gpu.models import engine_of, find_size
from benchmarks.peers.workloads import OFFLINE, ONLINE, Ask, Job, Record, run_offline, run_online
from handover.arguments import ScriptArguments
from handover.errors import ServerError, exit_status
from handover.provenance import read_commit


@dataclass(frozen=True)
class JobArguments(ScriptArguments):
    """What to measure."""

    job: Path = field(metadata={"help": "file that benchmarks.peers.compare has written"})


class Client:
    """Asks the engine.

    Args:
        engine: open.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def answer_rows(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Answer equal rows in one request."""
        tensors = generate.tensors_of([generate.Ask(*ask) for ask in asks], self._engine.config.vocab_size)
        (answer,) = self._engine.generate([self._engine.parse(tensors)])
        rows = zip(asks, answer["output_ids"][:, 0].tolist(), answer["sequence_length"][:, 0].tolist(), strict=True)
        return [ids[len(ask.prompt) : length] for ask, ids, length in rows]

    def answer_requests(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Answer requests that arrive at once."""
        futures = [Future[Answer]() for _ in asks]
        for ask, future in zip(asks, futures, strict=True):
            self._submit(generate.tensors_of([generate.Ask(*ask)], self._engine.config.vocab_size), future.set_result)
        found = list[list[int]]()
        for ask, answer in zip(asks, [future.result() for future in futures], strict=True):
            if not isinstance(answer, Tensors):
                raise ServerError(f"a request failed: {getattr(answer, 'problem', answer)}")
            found.append(answer.tensors["output_ids"][0, 0, len(ask.prompt) :].tolist())
        return found

    def _submit(self, tensors: dict[str, Array], answer: Callable[[Answer], None], is_streaming: bool = False) -> None:
        """Have the engine's thread parse a request and submit it, as an endpoint's requests are."""

        def submit() -> None:
            try:
                request = self._engine.parse(tensors)
            except RequestError as error:
                answer(Failure(str(error)))
            else:
                self._engine.submit(request, answer, is_streaming)

        self._engine.announce(Unparsed([submit]))

    async def stream(self, ask: Ask, record: Record) -> None:
        """Answer a request token by token; see ``Streams``. Times are taken in the engine's thread."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str | None] = loop.create_future()
        tensors = generate.tensors_of([generate.Ask(*ask)], self._engine.config.vocab_size)

        def take(answer: Answer) -> None:
            moment = time.perf_counter()
            if isinstance(answer, Tensors):
                record.times.append((moment, int(answer.tensors["sequence_length"][0, 0]) - len(ask.prompt)))
            if answer.is_final:
                loop.call_soon_threadsafe(ended.set_result, getattr(answer, "problem", None))

        self._submit(tensors, take, is_streaming=True)
        problem = await ended
        if problem is not None:
            raise ServerError(f"a request failed: {problem}")


@contextmanager
def opened(job: Job) -> Iterator[Engine]:
    """Open the engine around the job's model."""
    gpus = {"tensor_para_size": job.tensor_para_size, "pipeline_para_size": 1, "kv_cache_bytes": job.kv_cache_bytes}
    if job.is_made_up:
        with engine_of(find_size(job.shape), job.data_type, 0, job.kind, has_prefix_cache=True, **gpus) as engine:
            yield engine
        return
    checkpoint = Path(job.checkpoint)
    engine = open_engine(Settings(checkpoint, data_type=job.data_type, model_type=job.model_type, **gpus))
    try:
        yield engine
    finally:
        engine.close()


def main(argv: Sequence[str]) -> None:
    """Measure the job's parts."""
    job = Job.read(JobArguments.from_argv(argv, description=__doc__).job)
    gpu = job.name_gpus(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "gpu": gpu, "commit": read_commit()}
    with opened(job) as engine:
        job.add("engine", **versions, settings=engine.description)
        client = Client(engine)
        if OFFLINE in job.parts:
            run_offline(job, client.answer_rows, client.answer_requests)
        if ONLINE in job.parts:
            asyncio.run(run_online(job, client))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.peers.slipway"))
