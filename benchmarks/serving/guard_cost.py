"""Ask one server through the guard and past it, in alternation; print medians and ratios of both.

    python3 -m benchmarks.serving.guard_cost                          # a made-up model, decoupled
    chrt -r 1 python3 -m benchmarks.serving.guard_cost --rounds=60    # where other work shares the cores
    python3 -m benchmarks.serving.guard_cost --shape='[24,2048,16]' --data-type=fp16    # on a GPU

Four kinds of request: a health question (what a hop costs), a request that is answered once (the tokenizer's model,
gRPC and HTTP, binary), and streams (gRPC, and /generate_stream over HTTP), of which the time to the first token and the
tokens per second of several at a time are measured. The last columns are the guard's own: microseconds of processor
time, and how often it waited, for a request, or for all streams of a turn. The bar on an H200's machine: the first
token at most 0.3 ms later, throughput within 2%.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from benchmarks.serving.made_up_repository import write_repository
from deployment.arguments import ServeArguments
from deployment.processes.linux import command_line, descendants
from handover.arguments import ScriptArguments
from handover.endpoint import Endpoint
from handover.errors import ServerError, exit_status

MODEL, UNARY = "fastertransformer", "preprocessing"
PROMPT_LENGTH = 16
DIRECT, GUARDED = "direct", "guarded"


@dataclass(frozen=True)
class CostArguments(ScriptArguments):
    """What to measure."""

    shape: tuple[int, int, int] = field(default=(2, 64, 2), metadata={"help": "layers, hidden units, heads"})
    data_type: str = field(default="fp32", metadata={"help": "fp32 (on a CPU), fp16 (on a GPU) or bf16"})
    rounds: int = field(default=30, metadata={"help": "turns of each side, of the throughput a third of it"})
    tokens: int = field(default=64, metadata={"help": "of a stream"})
    streams: int = field(default=16, metadata={"help": "at a time, for the throughput"})
    kv_cache_bytes: int = field(default=1 << 28, metadata={"help": "of the engine"})
    start_timeout_s: float = field(default=300, metadata={"help": "seconds until the server must be ready"})


@dataclass(frozen=True)
class Side:
    """One way to the server; ``guard`` is the process on it, or 0."""

    name: str
    http_port: int
    grpc_port: int
    guard: int = 0

    def spent(self) -> tuple[float, int]:
        """Microseconds that the guard has run, and how often it waited."""
        if not self.guard:
            return 0.0, 0
        process = Path("/proc", str(self.guard))
        waits = next(line for line in (process / "status").read_text().splitlines() if line.startswith("voluntary"))
        return int((process / "schedstat").read_text().split()[0]) / 1e3, int(waits.split()[-1])


def main(argv: list[str]) -> None:
    """Start a server with the guard, measure both ways to it, and print a table."""
    arguments = CostArguments.from_argv(argv, __doc__)
    with (
        tempfile.TemporaryDirectory(prefix="slipway-guard-") as directory,
        serving(arguments, Path(directory)) as sides,
    ):
        print(f"{'':34} {DIRECT:>10} {GUARDED:>10} {'more':>10} {'ratio':>7} {'us':>7} {'waits':>6}")
        for name, make in CASES.items():
            calls = {side.name: make(side, arguments) for side in sides}
            show(f"{name}, ms", sides[1], calls, arguments.rounds, lambda seconds: seconds * 1e3)
        count = arguments.streams * arguments.tokens
        for name, stream in STREAMS.items():
            loads = {side.name: crowd(stream, side, arguments) for side in sides}
            row = f"{name}, {arguments.streams} at a time, tokens/s"
            show(row, sides[1], loads, max(3, arguments.rounds // 3), lambda seconds: count / seconds)


@contextmanager
def serving(arguments: CostArguments, directory: Path) -> Iterator[tuple[Side, Side]]:
    """Serve a made-up model, with the guard; give the way past it and the one through it."""
    repository = write_repository(directory, arguments.shape, arguments.data_type, arguments.kv_cache_bytes)
    endpoint = directory / "run" / "endpoint.json"
    served = ServeArguments(repository, endpoint, directory / "run" / "server.log", guard="always")
    server = subprocess.Popen([sys.executable, "-m", "deployment.serve", *served.to_argv()])
    try:
        deadline = time.monotonic() + arguments.start_timeout_s
        while not endpoint.exists():
            if server.poll() is not None or time.monotonic() > deadline:
                raise ServerError("the server did not start")
            time.sleep(0.1)
        public = Endpoint.read(endpoint)
        lines = {process.pid: command_line(process.pid) for process in descendants([server.pid])}
        flags = next(line for line in lines.values() if line and Path(line[0]).name == "tritonserver")
        guard = next(pid for pid, line in lines.items() if line and "deployment.guard" in line)
        given = dict(flag.lstrip("-").partition("=")[::2] for flag in flags[1:])
        direct = Side(DIRECT, int(given["http-port"]), int(given["grpc-port"]))
        yield direct, Side(GUARDED, public.http_port, public.grpc_port, guard)
    finally:
        server.terminate()
        server.wait()


def alternate(calls: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Take the sides in turns, the first turn of each uncounted; give the seconds that each call says."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name in sorted(calls, reverse=number % 2 == 1):
            seconds = calls[name]()
            if number:
                times[name].append(seconds)
    return times


def show(
    name: str, guarded: Side, calls: dict[str, Callable[[], float]], rounds: int, shown: Callable[[float], float]
) -> None:
    """Measure a row and print its medians."""
    before = guarded.spent()
    times = alternate(calls, rounds)
    us, waits = ((now - then) / (rounds + 1) for now, then in zip(guarded.spent(), before, strict=True))
    a, b = (statistics.median(map(shown, times[side])) for side in (DIRECT, GUARDED))
    print(f"{name:34} {a:10.3f} {b:10.3f} {b - a:+10.3f} {b / a:7.3f} {us:7.0f} {waits:6.1f}", flush=True)


def timed(call: Callable[[], Any]) -> Callable[[], float]:
    """Make a call say how long it took."""

    def measure() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return measure


def make_inputs(module: Any, tensors: dict[str, np.ndarray]) -> list[Any]:
    """The tensors of a request, for either client library."""
    inputs = []
    for name, array in tensors.items():
        kind = {"O": "BYTES", "u": "UINT32"}[array.dtype.kind]
        inputs.append(module.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def health(module: Any, port: int) -> Callable[[], float]:
    """Ask whether the server lives."""
    return timed(module.InferenceServerClient(f"127.0.0.1:{port}").is_server_live)


def unary(module: Any, port: int) -> Callable[[], float]:
    """Ask the tokenizer's model, which answers once."""
    tensors = {"QUERY": np.array([["a text of some words"]], object), "REQUEST_OUTPUT_LEN": np.array([[4]], np.uint32)}
    client, inputs = module.InferenceServerClient(f"127.0.0.1:{port}"), make_inputs(module, tensors)
    return timed(lambda: client.infer(UNARY, inputs))


class GrpcStream:
    """A gRPC stream, asked again and again."""

    def __init__(self, side: Side, arguments: CostArguments) -> None:
        self._answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        one = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each
        self._client = triton_grpc.InferenceServerClient(f"127.0.0.1:{side.grpc_port}", channel_args=one)
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))
        self._tokens = arguments.tokens

    def first(self) -> float:
        """Ask for a text; give the seconds to its first token, and wait for the others."""
        tensors = {
            "input_ids": np.arange(40, 40 + PROMPT_LENGTH, dtype=np.uint32)[None],
            "input_lengths": np.array([[PROMPT_LENGTH]], np.uint32),
            "request_output_len": np.array([[self._tokens]], np.uint32),
        }
        inputs = make_inputs(triton_grpc, tensors)
        started, first = time.perf_counter(), 0.0
        self._client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True)
        while True:
            result, error = self._answers.get(timeout=60)
            if error is not None:
                raise error
            first = first or time.perf_counter() - started
            if result.get_response().parameters["triton_final_response"].bool_param:
                return first


class HttpStream:
    """/generate_stream over one connection, asked again and again."""

    def __init__(self, side: Side, arguments: CostArguments) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", side.http_port, timeout=60)
        self._body = json.dumps({"INPUT_0": "a text of some words", "INPUT_1": arguments.tokens})

    def first(self) -> float:
        """Ask for a text; give the seconds to its first token, and wait for the others."""
        started = time.perf_counter()
        self._connection.request("POST", "/v2/models/ensemble/generate_stream", self._body)
        answer = self._connection.getresponse()
        answer.readline()
        first = time.perf_counter() - started
        answer.read()
        return first


def crowd(stream: Any, side: Side, arguments: CostArguments) -> Callable[[], float]:
    """Ask by several streams at a time."""
    streams = [stream(side, arguments) for _ in range(arguments.streams)]
    threads = ThreadPoolExecutor(len(streams))
    return timed(lambda: list(threads.map(lambda each: each.first(), streams)))


CASES: dict[str, Callable[[Side, CostArguments], Callable[[], float]]] = {
    "health, gRPC": lambda side, _: health(triton_grpc, side.grpc_port),
    "health, HTTP": lambda side, _: health(triton_http, side.http_port),
    "one answer, gRPC": lambda side, _: unary(triton_grpc, side.grpc_port),
    "one answer, HTTP": lambda side, _: unary(triton_http, side.http_port),
    "first token, gRPC": lambda side, arguments: GrpcStream(side, arguments).first,
    "first token, HTTP": lambda side, arguments: HttpStream(side, arguments).first,
}
STREAMS: dict[str, Any] = {"gRPC": GrpcStream, "HTTP": HttpStream}


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "guard_cost"))
