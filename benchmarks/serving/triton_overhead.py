"""Time the same prompts in the engine in process and through tritonserver, in alternation; print the difference.

    chrt -r 1 python3 -m benchmarks.serving.triton_overhead                 # token by token, made-up weights
    python3 -m benchmarks.serving.triton_overhead --model-repository=results/.../model_repo      # starts a server
    python3 -m benchmarks.serving.triton_overhead --endpoint=results/.../deployment              # uses a running one

Where other work shares the cores, ``chrt -r 1`` goes ahead of it. A decoupled store is asked token by token, directly
and through the ensemble; without a store beside models that compute nothing: what those take is Triton's own.

Both sides run the same engine code on the same shards with the same settings, greedy, without log-probabilities. The
server is asked over gRPC from one connection, one request at a time, so the difference is what Triton adds to a lone
request: the client, gRPC, the scheduler, shared memory and the Python stub.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.model.precision import choose_device
from backends.fastertransformer.engine.settings import read_settings
from benchmarks.gpu.models import Table
from benchmarks.serving.made_up_repository import write_empty_models, write_repository
from benchmarks.serving.token_overhead import show_tokens
from deployment.arguments import ServeArguments
from handover.arguments import ScriptArguments
from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError, exit_status

MODEL = "fastertransformer"
TINY, LARGE = ((2, 64, 2), "fp32"), ((24, 2048, 16), "fp16")  # layers, hidden units, heads
Tensors = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class OverheadArguments(ScriptArguments):
    """What to measure."""

    endpoint: str | None = field(default=None, metadata={"help": "endpoint.json, its directory, or host:grpc_port"})
    model_repository: Path | None = field(default=None, metadata={"help": "served there, or to be served"})
    cases: tuple[tuple[int, int, int], ...] = field(
        default=((1, 16, 1), (1, 16, 32), (8, 16, 1), (8, 16, 32)),
        metadata={"help": "JSON list of [batch size, input length, output length]"},
    )
    repeats: int = field(default=30, metadata={"help": "measurements of each side and case"})
    lengths: tuple[int, int] = field(default=(60, 64), metadata={"help": "JSON: tokens in and out, token by token"})
    clients: tuple[int, ...] = field(default=(1, 8), metadata={"help": "JSON list of requests at once, token by token"})
    rounds: int = field(default=6, metadata={"help": "turns of each side, token by token"})
    shape: tuple[int, int, int] | None = field(
        default=None, metadata={"help": "made up: layers, hidden units, heads; tiny on a CPU, 1.3B on a GPU"}
    )
    data_type: str | None = field(default=None, metadata={"help": "made up: fp32 (on a CPU), fp16 (on a GPU) or bf16"})
    empty_models: bool = field(default=True, metadata={"help": "made up: serve models too that compute nothing"})
    kv_cache_bytes: int = field(default=1 << 30, metadata={"help": "made up: of each of the two engines"})
    csv: Path | None = field(default=None, metadata={"help": "file to write, token by token"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})
    start_timeout_s: float = field(default=120, metadata={"help": "seconds until a server of its own must be ready"})


def make_request(batch_size: int, input_length: int, output_length: int, vocab_size: int) -> Tensors:
    """Make random prompts whose generation never ends early (end_id outside the vocabulary)."""
    ids = np.random.default_rng(0).integers(0, vocab_size, (batch_size, input_length), dtype=np.uint32)
    ones = np.ones((batch_size, 1), np.uint32)
    return {
        "input_ids": ids,
        "input_lengths": input_length * ones,
        "request_output_len": output_length * ones,
        "end_id": np.uint32(0xFFFFFFFF) * ones,
    }


def ask_engine(engine: Engine, tensors: Tensors) -> np.ndarray[Any, Any]:
    """Generate in this process: output_ids."""
    return engine.generate([engine.parse(tensors)])[0]["output_ids"]


def ask_server(client: triton.InferenceServerClient, tensors: Tensors) -> np.ndarray[Any, Any]:
    """Generate through the server: output_ids."""
    inputs = []
    for name, array in tensors.items():
        inputs.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    answer = client.infer(MODEL, inputs, outputs=[triton.InferRequestedOutput("output_ids")])
    output: np.ndarray[Any, Any] | None = answer.as_numpy("output_ids")
    if output is None:
        raise ServerError(f"{MODEL} answered without output_ids")
    return output


def alternate(sides: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Measure each side in turn, repeats times after one warm-up: milliseconds."""
    times_ms: list[list[float]] = [[] for _ in sides]
    for repeat in range(repeats + 1):
        for side, recorded in zip(sides, times_ms, strict=True):
            start = time.perf_counter()
            side()
            if repeat:
                recorded.append((time.perf_counter() - start) * 1e3)
    return times_ms


def open_same_engine(client: triton.InferenceServerClient, repository: Path) -> Engine:
    """Load what the server serves, with the parameters that it serves it with."""
    config = client.get_model_config(MODEL).config
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    settings = read_settings(parameters, repository / MODEL, "1")
    return open_engine(settings)


@contextlib.contextmanager
def deployment(arguments: OverheadArguments) -> Iterator[Endpoint]:
    """Give a running deployment; start and stop one if no endpoint is given."""
    if arguments.endpoint is not None:
        yield Endpoint.read(arguments.endpoint)
        return
    if arguments.model_repository is None:
        raise ConfigError("neither an endpoint nor a model repository", "give --endpoint or --model-repository")
    with tempfile.TemporaryDirectory() as directory:
        endpoint, log = Path(directory, "endpoint.json"), Path(directory, "server.log")
        serve = ServeArguments(arguments.model_repository, endpoint, log, start_timeout_s=arguments.start_timeout_s)
        server = subprocess.Popen([sys.executable, "-m", "deployment.serve", *serve.to_argv()])
        try:
            while not endpoint.exists():
                if server.poll() is not None:
                    raise ServerError(f"deployment.serve ended with status {server.returncode}")
                time.sleep(0.2)
            yield Endpoint.read(endpoint)
        finally:
            server.terminate()
            server.wait()


def main(argv: Sequence[str]) -> None:
    """Measure and print a table."""
    arguments = OverheadArguments.from_argv(argv, __doc__)
    with contextlib.ExitStack() as stack:
        if arguments.endpoint is None and arguments.model_repository is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            shape, data_type = TINY if choose_device().type == "cpu" else LARGE
            shape, data_type = arguments.shape or shape, arguments.data_type or data_type
            made_up = write_repository(directory, shape, data_type, arguments.kv_cache_bytes)
            if arguments.empty_models:
                write_empty_models(made_up)
            arguments = replace(arguments, model_repository=made_up)
        endpoint = stack.enter_context(deployment(arguments))
        client = stack.enter_context(triton.InferenceServerClient(endpoint.grpc_url))
        repository = arguments.model_repository or Path(endpoint.model_repository)
        if not (repository / MODEL).is_dir():
            raise ConfigError(f"no model repository at '{repository}'", "give --model-repository beside --endpoint")
        engine = open_same_engine(client, repository)
        print(engine.description)
        if client.get_model_config(MODEL).config.model_transaction_policy.decoupled:
            asked = arguments.lengths, arguments.clients, arguments.rounds
            show_tokens(engine, endpoint.grpc_url, repository, Table(arguments.csv, arguments.commit), asked)
        else:
            show_whole(engine, client, arguments)


def show_whole(engine: Engine, client: triton.InferenceServerClient, arguments: OverheadArguments) -> None:
    """Print the table of whole answers."""
    print(f"{'batch':>5} {'input':>5} {'output':>6} {'engine ms':>10} {'Triton ms':>10} {'added ms':>9} {'ratio':>6}")
    for batch_size, input_length, output_length in arguments.cases:
        tensors = make_request(batch_size, input_length, output_length, engine.config.vocab_size)
        if not np.array_equal(ask_engine(engine, tensors), ask_server(client, tensors)):
            raise ServerError(f"server and engine disagree on batch {batch_size}, {input_length}/{output_length}")
        sides = (lambda t=tensors: ask_engine(engine, t), lambda t=tensors: ask_server(client, t))
        engine_ms, triton_ms = map(statistics.median, alternate(sides, arguments.repeats))
        print(
            f"{batch_size:5} {input_length:5} {output_length:6} {engine_ms:10.2f} {triton_ms:10.2f}"
            f" {triton_ms - engine_ms:9.2f} {triton_ms / engine_ms:6.2f}"
        )


def _spin_as_the_server_does() -> None:
    """Start over with the server's OpenMP setting (model.py), which is read when torch is loaded."""
    if "GOMP_SPINCOUNT" not in os.environ:
        argv = [sys.executable, "-m", "benchmarks.serving.triton_overhead", *sys.argv[1:]]
        os.execve(sys.executable, argv, {**os.environ, "GOMP_SPINCOUNT": "2000"})


if __name__ == "__main__":
    _spin_as_the_server_does()
    raise SystemExit(exit_status(main, "triton_overhead"))
