"""Time conversations of several turns at two deployments, with the prefix cache and without, by turns in one run.

    OMP_NUM_THREADS=1 python3 -m benchmarks.engine.chat_turns                  # the demonstration's Llama on a CPU
    OMP_NUM_THREADS=1 python3 -m benchmarks.engine.chat_turns --in-process=true --at-once=1   # varies less
    python3 -m benchmarks.engine.chat_turns --checkpoint=.../1-gpu --conversations=64 --at-once=64 --csv=chat.csv

Each turn sends the whole conversation so far and a new question over the OpenAI endpoint as token ids, so it repeats
the prompt and the answer of the turn before it. The rows ``alike`` 0 have as many prompts of the same lengths, and no
two of these have anything in common: what the cache costs there is a loss. Every round draws other tokens, the same for
both deployments; the first one is not counted. Processor time is that of the engine's stub, the median of the rounds;
its ratio to the one without the cache is taken in each round, and the table has its quartiles. One thread is measured
best where others use the machine: threads that wait for each other spend processor time too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.settings import read_settings
from benchmarks.engine.generate import Ask as Prompt
from benchmarks.engine.generate import tensors_of
from benchmarks.gpu.models import Table
from benchmarks.serving.triton_overhead import MODEL
from deployment.arguments import ServeArguments
from deployment.processes.linux import command_line, descendants
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from handover.arguments import ScriptArguments
from handover.endpoint import Endpoint
from handover.errors import ServerError, exit_status
from handover.manifest import FILE_NAME as MANIFEST_NAME

_PROJECT = Path(__file__).resolve().parents[2]
_DEMO = _PROJECT / "examples" / "llama_demo" / "checkpoints" / "llama_demo.nemo"
_PARAMETER = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'
_STOP_S = 60.0
_PAGE_S = 30.0
_PREFIX = re.compile(r"^vllm:prefix_cache_(hits|queries)_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class ChatTurnsArguments(ScriptArguments):
    """What to measure."""

    checkpoint: Path | None = field(default=None, metadata={"help": "a <T>-gpu directory with T 1; else the demo's"})
    data_type: str = field(default="fp32", metadata={"help": "fp32, fp16 or bf16: of the computation"})
    conversations: int = field(default=16, metadata={"help": "of each round"})
    at_once: int = field(default=4, metadata={"help": "conversations at a time"})
    turns: int = field(default=6, metadata={"help": "of a conversation"})
    question: int = field(default=40, metadata={"help": "tokens that a turn adds to the prompt"})
    answer: int = field(default=40, metadata={"help": "tokens of each answer"})
    vocab_size: int = field(default=8000, metadata={"help": "questions are made of tokens below it"})
    in_process: bool = field(default=False, metadata={"help": "engines in this process in place of deployments"})
    kv_cache_bytes: int = field(default=1 << 28, metadata={"help": "of each of the two engines"})
    rounds: int = field(default=4, metadata={"help": "that count"})
    seed: int = field(default=0, metadata={"help": "of the questions"})
    timeout_s: float = field(default=120.0, metadata={"help": "seconds for one request, and for the start of a server"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One kind of prompts, one deployment; ratios are to that without the cache, ``found`` is a part of the tokens."""

    alike: int
    prefix_cache: int
    requests: int
    prompt_tokens: int
    found: float
    engine_cpu_s: float
    cpu_ratio: float
    cpu_ratio_q1: float
    cpu_ratio_q3: float
    p50_first_token_ms: float


@dataclass(frozen=True)
class Reply:
    """What came for one prompt: milliseconds to the first token, and the tokens."""

    first_ms: float
    ids: tuple[int, ...]


@dataclass
class Figures:
    """What was measured of one kind of prompts at one deployment.

    Attributes:
        first_ms: of every request.
        cpu_s: the engine's processor time, of each round.
        hits, queries: tokens that were found in the prefix cache, and that were looked for.
        prompt_tokens: of every prompt.
    """

    first_ms: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    hits: float = 0
    queries: float = 0
    prompt_tokens: int = 0


Ask = Callable[[list[int]], Awaitable[Reply]]


async def converse(ask: Ask, arguments: ChatTurnsArguments, is_alike: bool, seed: str) -> list[tuple[int, Reply]]:
    """Hold one conversation; gives the length of each prompt and its reply.

    Args:
        ask: sends a prompt.
        arguments: of the run.
        is_alike: whether each turn repeats the one before it; else it has as many tokens of its own.
        seed: of the tokens; two conversations have nothing in common.
    """
    chance, past, found = random.Random(seed), list[int](), list[tuple[int, Reply]]()
    for _ in range(arguments.turns):
        count = arguments.question if is_alike else len(past) + arguments.question
        drawn = [chance.randrange(arguments.vocab_size) for _ in range(count)]
        prompt = past + drawn if is_alike else drawn
        reply = await ask(prompt)
        found.append((len(prompt), reply))
        past = [*prompt, *reply.ids]
    return found


def read_prefix_counts(page: str) -> tuple[float, float]:
    """Return the tokens that were found in the prefix cache, and those that were looked for, of a page of metrics."""
    counts = {"hits": 0.0, "queries": 0.0}
    for name, value in _PREFIX.findall(page):
        counts[name] += float(value)
    return counts["hits"], counts["queries"]


def rows_of(figures: dict[tuple[bool, bool], Figures]) -> Iterator[Row]:
    """Give the table.

    Args:
        figures: by whether prompts are alike and whether there is the cache.
    """
    for (is_alike, has_cache), measured in figures.items():
        pairs = zip(measured.cpu_s, figures[is_alike, False].cpu_s, strict=True)
        ratios = [own_s / other_s for own_s, other_s in pairs]
        low, middle, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
        yield Row(
            int(is_alike),
            int(has_cache),
            len(measured.first_ms),
            measured.prompt_tokens,
            measured.hits / measured.queries if measured.queries else 0.0,
            statistics.median(measured.cpu_s),
            middle,
            low,
            high,
            statistics.median(measured.first_ms),
        )


class Side(ABC):
    """An engine, with the prefix cache or without it, that is asked in rounds."""

    def __init__(self, arguments: ChatTurnsArguments) -> None:
        self._arguments, self._counts = arguments, (0.0, 0.0)

    @abstractmethod
    def _asking(self) -> contextlib.AbstractAsyncContextManager[Ask]:
        """Give what sends a prompt."""

    @abstractmethod
    def _cpu_s(self) -> float:
        """Read the engine's processor time."""

    @abstractmethod
    def _prefix_counts(self) -> tuple[float, float]:
        """Read how many tokens were found in the prefix cache, and how many were looked for."""

    def take_round(self, is_alike: bool, number: int, figures: Figures | None) -> list[tuple[int, ...]]:
        """Hold all conversations of a round; gives the answers.

        Args:
            is_alike: see ``converse``.
            number: of the round.
            figures: are added to; None: this round does not count.
        """
        before = self._cpu_s()
        found = asyncio.run(self._round(is_alike, f"{self._arguments.seed} {is_alike} {number}"))
        cpu_s, last, self._counts = self._cpu_s() - before, self._counts, self._prefix_counts()
        if figures is not None:
            figures.cpu_s.append(cpu_s)
            figures.hits, figures.queries = (
                each + now - then
                for each, now, then in zip((figures.hits, figures.queries), self._counts, last, strict=True)
            )
            figures.first_ms += [reply.first_ms for _, reply in found]
            figures.prompt_tokens += sum(length for length, _ in found)
        return [reply.ids for _, reply in found]

    async def _round(self, is_alike: bool, seed: str) -> list[tuple[int, Reply]]:
        places = asyncio.Semaphore(self._arguments.at_once)
        async with self._asking() as ask:

            async def hold(number: int) -> list[tuple[int, Reply]]:
                async with places:
                    return await converse(ask, self._arguments, is_alike, f"{seed} {number}")

            held = await asyncio.gather(*map(hold, range(self._arguments.conversations)))
        return [each for conversation in held for each in conversation]


class Served(Side):
    """A deployment that is asked over its OpenAI endpoint."""

    def __init__(self, endpoint: Endpoint, arguments: ChatTurnsArguments) -> None:
        super().__init__(arguments)
        self._endpoint = endpoint
        assert endpoint.pid is not None
        stubs = [each.pid for each in descendants([endpoint.pid]) if _is_engine(each.pid)]
        self._engine = psutil.Process(stubs[0])
        self._counts = self._prefix_counts()

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[Ask]:
        url = f"http://{self._endpoint.host}:{self._endpoint.openai_port}/v1/completions"
        wanted = {"model": MODEL, "max_tokens": self._arguments.answer, "temperature": 0, "ignore_eos": True}
        timeout = aiohttp.ClientTimeout(total=self._arguments.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:

            async def ask(prompt: list[int]) -> Reply:
                sent, first_ms, ids = time.perf_counter(), 0.0, list[int]()
                body = {**wanted, "prompt": prompt, "stream": True, "return_token_ids": True}
                async with session.post(url, json=body) as answer:
                    if answer.status != 200:
                        raise ServerError(f"a request was refused: {(await answer.text())[:500]}")
                    async for line in answer.content:
                        if not line.startswith(b"data: {"):
                            continue
                        for choice in json.loads(line[6:])["choices"]:
                            ids += choice["token_ids"]
                        first_ms = first_ms or (1000 * (time.perf_counter() - sent) if ids else 0)
                if len(ids) != self._arguments.answer:
                    raise ServerError(f"{len(ids)} tokens were generated instead of {self._arguments.answer}")
                return Reply(first_ms, tuple(ids))

            yield ask

    def _cpu_s(self) -> float:
        times = self._engine.cpu_times()
        return float(times.user + times.system)

    def _prefix_counts(self) -> tuple[float, float]:
        """Read the counters, which the engine publishes a moment after they change: until they stay the same."""
        url = f"http://{self._endpoint.host}:{self._endpoint.metrics_port}/metrics"
        deadline = time.monotonic() + _PAGE_S
        counts: tuple[float, float] | None = None
        while time.monotonic() < deadline:
            with urllib.request.urlopen(url, timeout=_PAGE_S) as page:
                last, counts = counts, read_prefix_counts(page.read().decode())
            if counts == last:
                return counts
            time.sleep(0.6)  # the engine publishes every 0.2 s
        raise ServerError("the counters of the prefix cache do not come to rest")


class InProcess(Side):
    """An engine in this process; its time has that of the client in it, which is little."""

    def __init__(self, repository: Path, arguments: ChatTurnsArguments) -> None:
        super().__init__(arguments)
        config = text_format.Parse((repository / MODEL / "config.pbtxt").read_text(), ModelConfig())
        parameters = {name: value.string_value for name, value in config.parameters.items()}
        self.engine = open_engine(read_settings(parameters, repository / MODEL, "1"))

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[Ask]:
        async def ask(prompt: list[int]) -> Reply:
            return await asyncio.to_thread(self._ask, prompt)

        yield ask

    def _ask(self, prompt: list[int]) -> Reply:
        answers, sent = queue.SimpleQueue[Answer](), time.perf_counter()
        wanted = [Prompt(prompt, self._arguments.answer)]
        self.engine.submit(self.engine.parse(tensors_of(wanted, self.engine.config.vocab_size)), answers.put, True)
        answer = answers.get(timeout=self._arguments.timeout_s)
        first_ms = 1000 * (time.perf_counter() - sent)
        while not answer.is_final:
            answer = answers.get(timeout=self._arguments.timeout_s)
        if isinstance(answer, Failure):
            raise ServerError(answer.problem)
        return Reply(first_ms, tuple(answer.tensors["output_ids"].ravel()[len(prompt) :].tolist()))

    def _cpu_s(self) -> float:
        return time.process_time()

    def _prefix_counts(self) -> tuple[float, float]:
        return self.engine.metrics.prefix_hits, self.engine.metrics.prefix_queries


def _is_engine(pid: int) -> bool:
    argv = command_line(pid)
    return len(argv) > 1 and "python_backend_stub" in argv[0] and f"/{MODEL}/" in argv[1]


def write_repository(checkpoint: Path, directory: Path, arguments: ChatTurnsArguments, has_cache: bool) -> Path:
    """Make a repository that streams, with the prefix cache or without it."""
    repository, sizes = directory / f"model_repo_{int(has_cache)}", (1, 1, arguments.data_type, 0, 0)
    given = ExportArguments(checkpoint, repository, MODEL, *sizes, max_batch_size=64, decoupled=True)
    build_repository(given)
    (repository / MANIFEST_NAME).unlink()  # it is to be another repository
    with (repository / MODEL / "config.pbtxt").open("a", encoding="utf-8") as config:
        config.write(_PARAMETER.format("enable_prefix_cache", int(has_cache)))
        config.write(_PARAMETER.format("kv_cache_bytes", arguments.kv_cache_bytes))
    return repository


@contextlib.contextmanager
def serve(repository: Path, timeout_s: float) -> Iterator[Endpoint]:
    """Run a deployment with an OpenAI endpoint."""
    directory = repository.with_name(f"{repository.name}_run")
    directory.mkdir()
    given = ServeArguments(
        repository, directory / "endpoint.json", directory / "server.log", openai_port=0, start_timeout_s=timeout_s
    )
    command = [sys.executable, "-m", "deployment.serve", *given.to_argv()]
    server = subprocess.Popen(command, cwd=_PROJECT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 2 * timeout_s
        while not given.endpoint.exists():
            if server.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"deployment.serve does not serve; its exit status is {server.poll()}")
            time.sleep(0.2)
        yield Endpoint.read(given.endpoint)
    finally:
        server.terminate()
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(_STOP_S)


def main(argv: Sequence[str]) -> None:
    """Measure and print a table, and whether both deployments gave the same answers."""
    arguments = ChatTurnsArguments.from_argv(argv, __doc__)
    figures = {(is_alike, has_cache): Figures() for is_alike in (True, False) for has_cache in (False, True)}
    answers = same = 0
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = directory / "1-gpu"
            convert(ConvertArguments(_DEMO, checkpoint, 1, arguments.data_type))
        sides: dict[bool, Side] = {}
        for has_cache in (False, True):
            repository = write_repository(checkpoint, directory, arguments, has_cache)
            if arguments.in_process:
                sides[has_cache] = alone = InProcess(repository, arguments)
                stack.callback(alone.engine.close)
            else:
                endpoint = stack.enter_context(serve(repository, arguments.timeout_s))
                sides[has_cache] = Served(endpoint, arguments)
        for number in range(arguments.rounds + 1):
            for is_alike in (True, False):
                order = (False, True) if number % 2 else (True, False)
                given = {
                    each: sides[each].take_round(is_alike, number, figures[is_alike, each] if number else None)
                    for each in order
                }
                answers += len(given[True])
                same += sum(mine == theirs for mine, theirs in zip(given[True], given[False], strict=True))
    table = Table(arguments.csv, arguments.commit)
    for row in rows_of(figures):
        table.add(row)
    print(f"{same} of {answers} answers are the same with the prefix cache and without it")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "chat_turns"))
