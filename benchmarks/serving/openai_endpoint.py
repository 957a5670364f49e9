"""Time token streams from the engine in process, through Triton and through the OpenAI endpoint, by turns in one run.

    chrt -r 1 python3 -m benchmarks.serving.openai_endpoint     # made-up weights: tiny on a CPU, 1.3B on a GPU
    python3 -m benchmarks.serving.openai_endpoint --shape='[32,4096,32]' --clients=[1,256] --processes=[1,8]
    python3 -m benchmarks.serving.openai_endpoint --model-repository=results/.../model_repo   # a decoupled one

All sides generate greedy tokens of the same prompt, or of its tokens in another order for each request
(``--alike=false``), which no prefix cache knows. ``fastertransformer`` is asked over gRPC, in streams that are kept
open, the endpoint and other OpenAI servers (``--url``) over HTTP connections that are kept. The endpoint asks the
engine through its socket, or over gRPC too (``--ways``). Clients run in processes of their own.

The table has, for each number of requests at once, medians over all requests of all rounds: milliseconds to the first
token and for each further one, what they are above the engine's in process, tokens a second of all requests together
(the median of the rounds) as a part of the engine's, and for the endpoint its processor time for a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import tritonclient.grpc as triton

from backends.fastertransformer.engine.model.precision import TORCH_TYPES, choose_device
from benchmarks.gpu.models import Table
from benchmarks.serving.event_streams import Crowd, Target
from benchmarks.serving.made_up_repository import write_repository
from benchmarks.serving.token_overhead import Arrivals, in_process, make_prompt, medians
from benchmarks.serving.token_overhead import Side as AsyncSide
from benchmarks.serving.triton_overhead import LARGE, MODEL, TINY, OverheadArguments, deployment, open_same_engine
from deployment.openai.arguments import OpenAIArguments
from deployment.processes.linux import descendants
from handover.arguments import ScriptArguments
from handover.endpoint import Endpoint
from handover.errors import ServerError, exit_status

IN_PROCESS, GRPC, SOCKET = "engine in process", "gRPC", "socket"
_FEW = 16
"""Requests at once up to which a turn is repeated, the first time uncounted: what ran before has left cold caches."""
_PAGE = 16
_LEAST_CACHE = 1 << 28
_PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class OpenAIEndpointArguments(ScriptArguments):
    """What to measure."""

    model_repository: Path | None = field(default=None, metadata={"help": "decoupled, to be served; else made up"})
    shape: tuple[int, int, int] | None = field(
        default=None, metadata={"help": "made up: layers, hidden units, heads; tiny on a CPU, 1.3B on a GPU"}
    )
    data_type: str | None = field(default=None, metadata={"help": "made up: fp32 (on a CPU), fp16 (on a GPU) or bf16"})
    max_batch_size: int = field(default=256, metadata={"help": "made up: sequences in a step"})
    kv_cache_bytes: int = field(
        default=0, metadata={"help": "made up: of each of the two engines; 0: room for all requests at once"}
    )
    lengths: tuple[int, int] = field(default=(60, 64), metadata={"help": "JSON: tokens in and out"})
    alike: bool = field(default=True, metadata={"help": "whether all prompts are the same; else none has been seen"})
    clients: tuple[int, ...] = field(default=(1, 8, 64), metadata={"help": "JSON list of requests at once"})
    processes: tuple[int, ...] = field(default=(1,), metadata={"help": "JSON list: processes of the endpoint"})
    ways: tuple[str, ...] = field(
        default=(SOCKET,), metadata={"help": f"JSON list: how the endpoint asks the engine, {SOCKET} or {GRPC}"}
    )
    rounds: int = field(default=6, metadata={"help": "turns of each side"})
    url: str = field(default="", metadata={"help": "http://host:port of another OpenAI server, beside them"})
    url_model: str = field(default="", metadata={"help": "name of the model there"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})
    start_timeout_s: float = field(default=300, metadata={"help": "seconds until the server must be ready"})


@dataclass(frozen=True)
class Row:
    """One line of the table; 0 where a side has no such figure."""

    clients: int
    requests: int
    first_ms: float
    first_added_ms: float
    further_ms: float
    further_added_ms: float
    tokens_per_s: float
    rate_ratio: float
    cpu_us_per_token: float
    side: str


@dataclass
class Side:
    """One way to the model, and what was measured of it.

    Attributes:
        ask: sends that many requests at once, and waits for all.
        pids: processes whose processor time is measured.
        arrivals: of all requests.
        rates: tokens a second, of each turn.
        cpu_s: processor time of the counted turns.
        tokens: of the counted turns.
    """

    ask: Callable[[int], Sequence[Arrivals]]
    pids: Sequence[int] = ()
    arrivals: list[Arrivals] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    cpu_s: float = 0
    tokens: int = 0

    def take_turn(self, count: int, is_counted: bool) -> None:
        """Ask once."""
        before = sum(map(_cpu_s, self.pids))
        arrivals = self.ask(count)
        if not is_counted:
            return
        tokens = sum(each.tokens for each in arrivals)
        seconds = (max(each.chunk_ns[-1] for each in arrivals) - min(each.sent_ns for each in arrivals)) / 1e9
        self.arrivals += arrivals
        self.rates.append(tokens / seconds)
        self.cpu_s += sum(map(_cpu_s, self.pids)) - before
        self.tokens += tokens


def _cpu_s(pid: int) -> float:
    """Read how long all threads of a process have run."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


@contextlib.contextmanager
def openai_processes(endpoint: Endpoint, repository: Path, count: int, way: str) -> Iterator[tuple[str, list[int]]]:
    """Run the OpenAI endpoint in that many processes; its URL and the processes that answer."""
    sockets = Path(endpoint.sockets) if way == SOCKET else None
    arguments = OpenAIArguments(
        endpoint.grpc_url, model_repository=repository.absolute(), processes=count, sockets=sockets
    )
    command = [sys.executable, "-m", "deployment.openai", *arguments.to_argv()]
    process = subprocess.Popen(command, cwd=_PROJECT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(count)]
        found = re.search(r"(http://\S+)/v1", lines[-1])
        if found is None:
            raise ServerError("the OpenAI endpoint did not start")
        pids = [each.pid for each in descendants([process.pid]) if count == 1 or each.pid != process.pid]
        yield found[1], pids
    finally:
        process.terminate()
        process.wait()


def measure(sides: dict[str, Side], count: int, rounds: int) -> list[Row]:
    """Let the sides take turns.

    Args:
        sides: by name; the first one is what the others are compared with.
        count: requests at once.
        rounds: turns of each side.
    """
    for number in range(rounds + 1):
        for side in sides.values():
            if count <= _FEW:
                side.take_turn(count, is_counted=False)
            side.take_turn(count, is_counted=number > 0)
    rows = list[Row]()
    for name, side in sides.items():
        first, further = medians(side.arrivals)
        rate = statistics.median(side.rates)
        base = rows[0] if rows else Row(count, 0, first, 0, further, 0, rate, 1, 0, "")
        figures = first, first - base.first_ms, further, further - base.further_ms, rate, rate / base.tokens_per_s
        cpu_us = 1e6 * side.cpu_s / side.tokens
        rows.append(Row(count, len(side.arrivals), *figures, cpu_us, name))
    return rows


@contextlib.contextmanager
def _served(arguments: OpenAIEndpointArguments) -> Iterator[tuple[Endpoint, Path]]:
    """Start Triton with the model."""
    with contextlib.ExitStack() as stack:
        repository = arguments.model_repository
        if repository is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            shape, data_type = TINY if choose_device().type == "cpu" else LARGE
            shape, data_type = arguments.shape or shape, arguments.data_type or data_type
            cache = arguments.kv_cache_bytes or _room(arguments, shape, data_type)
            repository = write_repository(directory, shape, data_type, cache, arguments.max_batch_size)
        wanted = OverheadArguments(model_repository=repository, start_timeout_s=arguments.start_timeout_s)
        yield stack.enter_context(deployment(wanted)), repository


def _room(arguments: OpenAIEndpointArguments, shape: tuple[int, int, int], data_type: str) -> int:
    """Return the bytes of a KV cache with room for as many requests as there are clients at most."""
    layers, hidden, _ = shape
    tokens = max(arguments.clients) * (sum(arguments.lengths) + 2 * _PAGE)
    return max(_LEAST_CACHE, tokens * 2 * layers * hidden * TORCH_TYPES[data_type].itemsize)


async def _wait(ask: AsyncSide, count: int) -> list[Arrivals]:
    return await ask(count)


def main(argv: Sequence[str]) -> None:
    """Measure and print a table."""
    arguments = OpenAIEndpointArguments.from_argv(argv, __doc__)
    with contextlib.ExitStack() as stack:
        endpoint, repository = stack.enter_context(_served(arguments))
        with triton.InferenceServerClient(endpoint.grpc_url) as client:
            engine = open_same_engine(client, repository)
        stack.callback(engine.close)
        prompt = make_prompt(repository, *arguments.lengths)
        crowd = Crowd(max(arguments.clients))
        stack.callback(crowd.close)
        ask_in_process = in_process(engine, prompt, arguments.alike)
        asked = [(GRPC, endpoint.grpc_url, MODEL, list[int]())]
        for way, count in product(arguments.ways, arguments.processes):
            url, pids = stack.enter_context(openai_processes(endpoint, repository, count, way))
            asked.append((f"endpoint, {way}, {count} process{'es' * (count > 1)}", url, MODEL, pids))
        if arguments.url:
            asked.append((arguments.url, arguments.url.removesuffix("/v1").rstrip("/"), arguments.url_model, []))
        print(engine.description)
        print(f"{len(prompt.ids)} tokens in, {prompt.output_length} out")
        table = Table(arguments.csv, arguments.commit)
        for clients in arguments.clients:
            sides = {IN_PROCESS: Side(lambda count: asyncio.run(_wait(ask_in_process, count)))}
            for name, url, model, pids in asked:
                target = Target(url, model, prompt.ids, prompt.output_length, arguments.alike)
                sides[name] = Side(partial(crowd.ask, target), pids)
            for row in measure(sides, clients, arguments.rounds):
                table.add(row)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "openai_endpoint"))
