"""Show that the load generator's client limits nothing: its own ceiling, and its latencies beside perf_analyzer's.

    python3 -m benchmarks.clients.load_client                                            # without a model of your own
    python3 -m benchmarks.clients.load_client --endpoint=results/.../deployment          # a running deployment
    python3 -m benchmarks.clients.load_client --model-repository=results/.../model_repo  # starts a server itself

Ceiling: a model whose answers come from Triton's response cache, without a backend, so that the server answers at once;
the client is held on one core. Requests/s are what came through; the ceiling is what the client's processor time per
request allows on that core, also where the server was the slower one.

Agreement: the same prompts on the same server by turns from our client and from Triton's perf_analyzer (the binary in
tritonclient's wheel), in one run: first on a model that answers after a fixed time, which shows the clients alone, then
on the deployment, whose times change from turn to turn with whatever else the machine does. Medians over the rounds of
each round's mean, p50 and requests/s, and of the ratio of each pair of turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as messages
from tritonclient.utils import triton_to_np_dtype

from benchmarks.clients.timed_model import timed_server
from benchmarks.serving.triton_overhead import OverheadArguments, deployment
from evaluation.client.client import Client
from evaluation.client.served_model import inspect_endpoint
from evaluation.speed.drive import ClosedLoop, MeasuringPlan, Recorder, drive
from evaluation.speed.prompts.tokens import RandomIds
from evaluation.speed.prompts.workload import DrawingContext, Workload, seeded
from evaluation.speed.tables import formulas
from evaluation.speed.transport.wire import Encoded, Wire, encode
from handover.arguments import ScriptArguments
from handover.errors import ServerError, exit_status

MODEL = "fastertransformer"
_MS = formulas.NANOSECONDS_PER_MS


@dataclass(frozen=True)
class LoadClientArguments(ScriptArguments):
    """What to measure."""

    endpoint: str | None = field(default=None, metadata={"help": "endpoint.json, its directory, or host:grpc_port"})
    model_repository: Path | None = field(default=None, metadata={"help": "to be served, without an endpoint"})
    concurrencies: tuple[int, ...] = field(default=(1, 4, 16), metadata={"help": "JSON list"})
    lengths: str = field(default="60/20", metadata={"help": "input and output length in tokens"})
    rounds: int = field(default=9, metadata={"help": "turns of each client at each concurrency"})
    requests: int = field(default=40, metadata={"help": "answers a turn, at least four times those in flight"})
    delay_ms: float = field(default=50.0, metadata={"help": "of the model that answers after a fixed time"})
    ceiling_s: float = field(default=5.0, metadata={"help": "seconds for each concurrency of the ceiling"})


@dataclass(frozen=True)
class Turn:
    """What one client saw in one turn, in ms and 1/s."""

    mean_ms: float
    p50_ms: float
    requests_per_s: float


def main(argv: Sequence[str]) -> None:
    """Print both tables."""
    arguments = LoadClientArguments.from_argv(argv, __doc__)
    show_ceiling(arguments)
    with timed_server(MODEL, arguments.delay_ms / 1e3, sorted(os.sched_getaffinity(0))) as url:
        what = f"a model that answers after {arguments.delay_ms:g} ms"
        show_agreement(arguments, url, prepare(MODEL, arguments.lengths, 1000, 64), what)
    if arguments.endpoint is None and arguments.model_repository is None:
        return
    with deployment(OverheadArguments(arguments.endpoint, arguments.model_repository)) as endpoint:
        with Client(endpoint.grpc_url) as client:
            parameters = client.describe(MODEL).parameters
        vocab_size = inspect_endpoint(endpoint, parameters).vocab_size
        if vocab_size is None:
            raise ServerError("the served model's vocabulary size is not known here")
        requests = prepare(MODEL, arguments.lengths, vocab_size, 64)
        show_agreement(arguments, endpoint.grpc_url, requests, endpoint.model_repository or endpoint.grpc_url)


def prepare(model: str, lengths: str, vocab_size: int, count: int) -> list[Encoded]:
    """Encode random prompts, the same in every run."""
    prompts = Workload.parse(lengths).prompts(DrawingContext(RandomIds(vocab_size), seeded(0, lengths)))
    return [encode(model, prompt) for prompt in islice(prompts, count)]


def show_ceiling(arguments: LoadClientArguments) -> None:
    """Print requests/s against a server that answers at once, the client on one core."""
    cores = sorted(os.sched_getaffinity(0))
    request = prepare(MODEL, arguments.lengths, 1000, 1)
    sys.stdout.write("client's ceiling, on one core, against a model that answers at once\n")
    sys.stdout.write(f"{'in flight':>9} {'requests/s':>10} {'client us/request':>17} {'ceiling requests/s':>18}\n")
    with timed_server(MODEL, 0.0, cores[1:] or cores) as url:
        os.sched_setaffinity(0, cores[:1])
        try:
            for concurrency in (1, *(number for number in arguments.concurrencies if number > 1)):
                plan = MeasuringPlan(200, sys.maxsize, 1, arguments.ceiling_s, lambda windows: False)
                before = time.process_time()
                recorder = ask(url, request, concurrency, plan)
                cpu_s, (window,) = time.process_time() - before, recorder.windows
                per_request_us = 1e6 * cpu_s / (len(window.records) + len(recorder.warmups))
                rate = len(window.succeeded) * 1e9 / window.duration_ns
                sys.stdout.write(f"{concurrency:9} {rate:10.0f} {per_request_us:17.0f} {1e6 / per_request_us:18.0f}\n")
        finally:
            os.sched_setaffinity(0, cores)


def ask(url: str, requests: Sequence[Encoded], concurrency: int, plan: MeasuringPlan) -> Recorder:
    """Keep up a closed loop in which every request must succeed."""

    async def run() -> Recorder:
        async with Wire(url, 60.0, is_streaming=False) as wire:
            return await drive(wire, requests, ClosedLoop(concurrency), plan)

    recorder = asyncio.run(run())
    failed = [record.error for window in recorder.windows for record in window.records if record.error]
    if failed or not recorder.windows:
        raise ServerError(f"requests failed: {failed[:1]}")
    return recorder


def show_agreement(arguments: LoadClientArguments, url: str, requests: Sequence[Encoded], what: str) -> None:
    """Print latencies by turns from our client and from perf_analyzer."""
    sys.stdout.write(f"\nlatency of {what}\n{arguments.lengths} tokens, medians of {arguments.rounds} turns each\n")
    sys.stdout.write(
        f"{'in flight':>9} {'mean ms':>9} {'PA mean':>9} {'off':>6} {'p50 ms':>9} {'PA p50':>9} {'off':>6} "
        f"{'req/s':>7} {'PA':>7} {'off':>6}\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        analyzer = PerfAnalyzer(url, requests, Path(directory))
        for concurrency in arguments.concurrencies:
            count = max(arguments.requests, 4 * concurrency)
            ours, theirs = [], []
            for number in range(2 * arguments.rounds):
                # A B, B A, A B, ...: what drifts on the machine meets both alike.
                if number % 4 in (0, 3):
                    ours.append(our_turn(url, requests, concurrency, count))
                else:
                    theirs.append(analyzer.turn(concurrency, count))
            sys.stdout.write(f"{concurrency:9}" + "".join(_pairs(ours, theirs)) + "\n")
            sys.stdout.flush()


def _pairs(ours: Sequence[Turn], theirs: Sequence[Turn]) -> Iterator[str]:
    for name, width in (("mean_ms", 10), ("p50_ms", 10), ("requests_per_s", 8)):
        pairs = [(getattr(left, name), getattr(right, name)) for left, right in zip(ours, theirs, strict=True)]
        left, right = (statistics.median(side) for side in zip(*pairs, strict=True))
        off = statistics.median(one / other - 1 for one, other in pairs)
        yield f"{left:{width}.2f}{right:{width}.2f}{100 * off:+6.1f}%"


def our_turn(url: str, requests: Sequence[Encoded], concurrency: int, count: int) -> Turn:
    """Let our client measure that many answers after as many as are in flight."""
    plan = MeasuringPlan(concurrency, count, 1, 600.0, lambda windows: False)
    (window,) = ask(url, requests, concurrency, plan).windows
    latencies = [(record.done_ns - record.sent_ns) / _MS for record in window.records]
    mean, middle = formulas.mean(latencies), formulas.percentile(latencies, 50)
    assert mean is not None and middle is not None
    return Turn(mean, middle, len(latencies) * 1e9 / window.duration_ns)


class PerfAnalyzer:
    """Triton's load tool, asking the same prompts.

    Args:
        url: of the server's gRPC.
        requests: whose tensors are written to its input file.
        directory: for its files.
    """

    def __init__(self, url: str, requests: Sequence[Encoded], directory: Path) -> None:
        self.url, self.directory = url, directory
        self.data = directory / "inputs.json"
        self.data.write_text(json.dumps({"data": [_tensors(request) for request in requests]}))
        self.environment = {**os.environ, **libraries(directory)}

    def turn(self, concurrency: int, count: int) -> Turn:
        """Let it measure that many answers."""
        report = self.directory / "report.csv"
        argv = [
            *(str(Path(sys.executable).parent / "perf_analyzer"), "-m", MODEL, "-u", self.url, "-i", "grpc", "--async"),
            *("--input-data", str(self.data), "--concurrency-range", str(concurrency), "-f", str(report)),
            # It always joins three windows; they are accepted whatever they show: the turns are what is compared.
            *("--measurement-mode", "count_windows", "--measurement-request-count", str(-(-count // 3))),
            *("--stability-percentage", "999"),
        ]
        ended = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False)
        rows = list(csv.DictReader(report.open())) if report.is_file() else []
        if len(rows) != 1:
            raise ServerError(f"perf_analyzer measured nothing: {(ended.stdout + ended.stderr)[-600:]}")
        report.unlink()
        row = rows[0]
        mean_us = row.get("Avg latency") or _mean_of_parts(row)
        return Turn(float(mean_us) / 1e3, float(row["p50 latency"]) / 1e3, float(row["Inferences/Second"]))


def _mean_of_parts(row: dict[str, str]) -> float:
    """Add up the parts of the mean latency in microseconds that perf_analyzer's CSV tells apart."""
    parts = ("Client Send", "Network+Server Send/Recv", "Server Queue", "Server Compute Input")
    return sum(float(row[name]) for name in (*parts, "Server Compute Infer", "Server Compute Output", "Client Recv"))


def _tensors(request: Encoded) -> dict[str, Any]:
    message = messages.ModelInferRequest.FromString(request.payload)
    return {
        tensor.name: {
            "content": np.frombuffer(raw, triton_to_np_dtype(tensor.datatype)).tolist(),
            "shape": list(tensor.shape)[1:],
        }
        for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    }


def libraries(directory: Path) -> dict[str, str]:
    """Give perf_analyzer the libcudart that it is linked to, under the name it asks for; nvidia-pytriton ships it."""
    for path in sys.path:
        for library in Path(path).glob("nvidia_pytriton.libs/libcudart-*.so.12*"):
            with contextlib.suppress(FileExistsError):
                (directory / "libcudart.so.12").symlink_to(library)
            known = os.environ.get("LD_LIBRARY_PATH")
            return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(directory), known]))}
    return {}


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "load_client"))
