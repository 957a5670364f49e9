"""Several replicas of a made-up model behind HAProxy: one of them killed under load, and their throughput beside one.

    python3 -m benchmarks.serving.replicas                            # two on a CPU, a core each
    python3 -m benchmarks.serving.replicas --replicas=4 --gpus=1 --shape='[40,4096,32]' --data-type=fp16 \
        --kv-cache-bytes=17179869184 --per-replica=64 --start-timeout-s=900      # four GPUs, 8B

200 clients read a stream each; the tritonserver of one replica is killed. Nothing may be lost but its own streams,
which each client asks for again a second later. Then one server alone, as many of them at once without a router, and
all replicas generate in turns, each as many sequences at a time for each server: the bar is 0.95 of N times one.
Without GPUs a server alone has the cores of a replica. What servers that share a machine cost each other, and what
other work costs the more of them, the second figure says. Clients and router take processor time too, which is counted:
on as many cores as servers it is taken from these, and N times one cannot be reached. ``--client-cores`` keeps some for
the clients alone. On an idle machine of three cores or more, a core for each server::

    taskset -c 0-2 python3 -m benchmarks.serving.replicas --client-cores=1 --seconds=20

What the router costs a request is said in processor time, its own and its part of all that the deployment takes: what
else the machine does hardly changes that. ``--streams=True`` has each token pass through it by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from benchmarks.serving.made_up_repository import write_repository
from deployment.arguments import ReplicasArguments, ServeArguments
from deployment.processes.linux import command_line, descendants
from deployment.replicas.replica import parts_of_cores
from handover.arguments import ScriptArguments
from handover.endpoint import Endpoint
from handover.errors import ServerError, exit_status

_PATH = "/v1/completions"
_BODY = {"model": "fastertransformer", "prompt": list(range(40, 56)), "temperature": 0, "ignore_eos": True}
_DONE = b"data: [DONE]"
_BAR = 0.95
_READY = "slipway_replicas_serving"
_SIDES = {"one": "one server", "at once": "as many alone at once", "many": "replicas behind the router"}
_WAIT_S = 600.0
_AGAIN_S = 1.0
"""What the router's refusals say in ``Retry-After``."""


@dataclass(frozen=True)
class ReplicaBenchmarkArguments(ScriptArguments):
    """What to measure."""

    replicas: int = field(default=2, metadata={"help": "servers"})
    gpus: int = field(default=0, metadata={"help": "of each server; 0: each has its part of the cores"})
    shape: tuple[int, int, int] = field(default=(4, 512, 8), metadata={"help": "layers, hidden units, heads"})
    data_type: str = field(default="fp32", metadata={"help": "fp32 (on a CPU), fp16 (on a GPU) or bf16"})
    clients: int = field(default=200, metadata={"help": "streams at a time, when one server is killed"})
    tokens: int = field(default=100, metadata={"help": "of a stream"})
    per_replica: int = field(default=8, metadata={"help": "sequences at a time for each server, for the throughput"})
    seconds: float = field(default=10.0, metadata={"help": "of a turn"})
    rounds: int = field(default=5, metadata={"help": "turns of each side"})
    kv_cache_bytes: int = field(default=1 << 30, metadata={"help": "of each server"})
    streams: bool = field(default=False, metadata={"help": "answers are streams, also those of the throughput"})
    client_cores: int = field(default=0, metadata={"help": "that the clients have for themselves; 0: they share all"})
    kill: bool = field(default=True, metadata={"help": "false: no server is killed, the throughput alone is measured"})
    start_timeout_s: float = field(default=300, metadata={"help": "seconds until a server must be ready"})


@dataclass
class Streams:
    """What became of the streams of many clients."""

    begun: int = 0
    whole: int = 0
    cut: int = 0
    unanswered: int = 0
    again: int = 0


def main(argv: Sequence[str]) -> None:
    """Start everything, kill, measure; ServerError: more was lost than had to be, or the bar is missed."""
    arguments = ReplicaBenchmarkArguments.from_argv(argv, __doc__)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= arguments.client_cores:
        raise ServerError(f"--client-cores={arguments.client_cores} of {len(cores)} leave the servers none")
    servers = cores[: len(cores) - arguments.client_cores]
    with tempfile.TemporaryDirectory(prefix="slipway-replicas-") as directory:
        place = Path(directory)
        sizes = arguments.shape, arguments.data_type, arguments.kv_cache_bytes
        repository = write_repository(place, *sizes, max_batch_size=max(64, arguments.clients))
        if arguments.client_cores:
            os.sched_setaffinity(0, cores[-arguments.client_cores :])
        with serving(arguments, repository, place / "many", arguments.replicas, servers) as (many, process):
            router = many()
            killed = asyncio.run(kill_one(router, process, arguments)) if arguments.kill else ""
            with contextlib.ExitStack() as stack:
                parts = parts_of_cores(arguments.replicas, servers)
                started = [
                    stack.enter_context(serving(arguments, repository, place / str(number), 1, own, number))[0]
                    for number, own in enumerate([servers] * len(parts) if arguments.gpus else parts)
                ]
                ratio = asyncio.run(compare([ready() for ready in started], router, arguments, process))
    problems = [killed] if killed else []
    problems += [] if ratio >= _BAR else [f"{ratio:.3f} of {arguments.replicas} times one, the bar is {_BAR}"]
    if problems:
        raise ServerError("; ".join(problems))


@contextlib.contextmanager
def serving(
    arguments: ReplicaBenchmarkArguments,
    repository: Path,
    place: Path,
    count: int,
    cores: Sequence[int],
    number: int = 0,
) -> Iterator[tuple[Callable[[], Endpoint], subprocess.Popen[bytes]]]:
    """Serve with that many servers; one stands alone, without a router, with the GPUs or cores of that replica.

    Returns:
        What waits until it serves, so that several start at a time, and its process.
    """
    place.mkdir()
    files = place / "endpoint.json", place / "server.log"
    own = ",".join(map(str, range(number * arguments.gpus, (number + 1) * arguments.gpus)))
    server = ServeArguments(repository, *files, openai_port=0, start_timeout_s=arguments.start_timeout_s, restart=3)
    if count == 1:
        command = ["deployment.serve", *replace(server, cuda_devices=own).to_argv()]
    else:
        given = ReplicasArguments("deployment.serve", server.to_argv(), replicas=count, gpus=arguments.gpus)
        command = ["deployment.replicas.serve", *given.to_argv()]
    process = subprocess.Popen(
        [sys.executable, "-m", *command], preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None
    )

    def ready() -> Endpoint:
        wait_for(lambda: files[0].exists() or process.poll() is not None)
        if process.poll() is not None:
            raise ServerError(f"{command[0]} did not start")
        return Endpoint.read(files[0])

    try:
        yield ready, process
    finally:
        process.terminate()
        process.wait()


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until something holds; ServerError: it takes too long."""
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise ServerError("it takes too long")
        time.sleep(0.1)


def session(endpoint: Endpoint) -> aiohttp.ClientSession:
    """Open connections of clients, as many as they want."""
    return aiohttp.ClientSession(
        f"http://{endpoint.host}:{endpoint.openai_port}", connector=aiohttp.TCPConnector(limit=0)
    )


async def kill_one(endpoint: Endpoint, process: subprocess.Popen[bytes], given: ReplicaBenchmarkArguments) -> str:
    """Kill a server under the streams of all clients, and print what that cost; return what must not be, or nothing."""
    streams = Streams()
    async with session(endpoint) as clients:
        tasks = [asyncio.create_task(read_stream(clients, given.tokens, streams)) for _ in range(given.clients)]
        while streams.begun < given.clients * 0.9:
            await asyncio.sleep(0.05)
        servers = [each.pid for each in descendants([process.pid]) if is_tritonserver(each.pid)]
        os.kill(servers[0], signal.SIGKILL)
        killed = time.monotonic()
        await asyncio.gather(*tasks)
        while await metric(endpoint, _READY) < given.replicas:
            await asyncio.sleep(0.2)
    share = -(-given.clients // given.replicas)
    lost = streams.cut + streams.unanswered
    print(f"{given.clients} streams, one of {given.replicas} servers killed: {streams.whole} whole, {streams.cut} cut, "
          f"{streams.unanswered} refused unanswered (its part: {share}); {streams.again} of {lost} whole when asked "
          f"again; replaced after {time.monotonic() - killed:.1f} s", flush=True)  # fmt: skip
    if lost > share or streams.again < lost:
        return f"{lost} streams were lost, where the server had {share}, and {lost - streams.again} of them twice"
    return ""


def is_tritonserver(pid: int) -> bool:
    """Whether a process is one."""
    line = command_line(pid)
    return bool(line) and Path(line[0]).name == "tritonserver"


async def read_stream(clients: aiohttp.ClientSession, tokens: int, streams: Streams, is_again: bool = False) -> None:
    """Read a stream to its end; ask once more for one that was cut, or not answered."""
    has_begun, is_whole = False, False
    try:
        async with clients.post(_PATH, json={**_BODY, "max_tokens": tokens, "stream": True}) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not has_begun and line.startswith(b"data: {"):
                    has_begun = True
                    streams.begun += 1
                is_whole |= line.startswith(_DONE)
    except aiohttp.ClientError:
        is_whole = False
    if is_again:
        streams.again += is_whole
    elif is_whole:
        streams.whole += 1
    else:
        streams.cut += has_begun
        streams.unanswered += not has_begun
        await asyncio.sleep(_AGAIN_S)
        await read_stream(clients, tokens, streams, is_again=True)


async def metric(endpoint: Endpoint, name: str) -> float:
    """Read a number of the page of metrics; -1: it is not there."""
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"http://{endpoint.host}:{endpoint.metrics_port}/metrics") as page,
    ):
        found = [line for line in (await page.text()).splitlines() if line.startswith(f"{name} ")]
    return float(found[0].split()[1]) if found else -1.0


def processor_s(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Return the processor time that the router and all that a process has started have taken so far."""
    router, everything = 0.0, 0.0
    for each in descendants([process.pid]):
        with contextlib.suppress(OSError):  # it has ended
            threads = [(thread / "schedstat").read_text() for thread in Path(f"/proc/{each.pid}/task").iterdir()]
            taken = sum(int(text.split()[0]) for text in threads) / 1e9
            everything += taken
            router += taken if Path((command_line(each.pid) or [""])[0]).name == "haproxy" else 0.0
    return router, everything


async def compare(
    alone: Sequence[Endpoint], many: Endpoint, given: ReplicaBenchmarkArguments, process: subprocess.Popen[bytes]
) -> float:
    """Generate in turns with one server and with all, print the rates, and return the ratio to N times one."""
    rates: dict[str, list[float]] = {"one": [], "at once": [], "many": []}
    count, shares = given.per_replica, dict[str, list[float]]({name: [] for name in rates})
    costs = list[tuple[float, float]]()
    for number in range(given.rounds + 1):  # the first turn of each is not counted
        turns = [("one", alone[:1], count), ("at once", alone, count), ("many", [many], given.replicas * count)]
        for name, endpoints, sequences in turns if number % 2 else reversed(turns):
            began, own, before = time.monotonic(), time.process_time(), processor_s(process)
            found = await asyncio.gather(*(generate(endpoint, sequences, given) for endpoint in endpoints))
            took, own = time.monotonic() - began, time.process_time() - own
            if number:
                rates[name].append(sum(rate for _, rate in found))
                shares[name].append(own / took)
            if number and name == "many":
                router, everything = (now - then for now, then in zip(processor_s(process), before, strict=True))
                costs.append((1e3 * router / sum(answers for answers, _ in found), 100 * router / everything))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = [many / one / given.replicas for one, many in zip(rates["one"], rates["many"], strict=True)]
    ratio = medians["many"] / medians["one"] / given.replicas
    for name, rate in medians.items():
        print(f"{_SIDES[name]:32} {rate:10.1f} tokens/s; clients {statistics.median(shares[name]):.3f} of a core",
              flush=True)  # fmt: skip
    cost, share = (statistics.median(column) for column in zip(*costs, strict=True))
    print(f"the router takes {cost:.3f} ms of a processor a request of {given.tokens} tokens, "
          f"{share:.3f}% of what it and the servers take", flush=True)  # fmt: skip
    print(f"{ratio:.3f} of {given.replicas} times one (by turn {min(ratios):.3f} to {max(ratios):.3f}), "
          f"{medians['many'] / medians['at once']:.3f} of as many at once", flush=True)  # fmt: skip
    return ratio


async def generate(endpoint: Endpoint, sequences: int, given: ReplicaBenchmarkArguments) -> tuple[int, float]:
    """Ask for one sequence after another, that many at a time; return the answers, and the tokens a second."""
    began = time.monotonic()
    done: list[float] = []
    body = {**_BODY, "max_tokens": given.tokens, "stream": given.streams}

    async def ask(clients: aiohttp.ClientSession) -> None:
        while time.monotonic() - began < given.seconds:
            async with clients.post(_PATH, json=body) as answer:
                answer.raise_for_status()
                await answer.read()
            done.append(time.monotonic())

    async with session(endpoint) as clients:
        await asyncio.gather(*(ask(clients) for _ in range(sequences)))
    return len(done), len(done) * given.tokens / (max(done) - began)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "replicas"))
