"""Several ranks on this machine: processes of their own, told by SLIPWAY_RANKS what each is.

Run as a program it is rank 0 without Triton: it answers the requests that a file holds, one after another. Processes
are forked from one that has imported torch and the engine, which takes longer than what most tests ask.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import queue
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROJECT = Path(__file__).resolve().parents[3]
CACHE_BYTES = 1 << 26  # tests side by side share GPUs
Tensors = dict[str, np.ndarray[Any, Any]]

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "backends.fastertransformer.engine.engine"])


class Program:
    """A Python program in a process of its own, with torch imported.

    Args:
        argv: ``-m`` and a module, or a file; then its arguments.
        environment: variables added to ours.
        output: file for what it prints.
    """

    def __init__(self, argv: list[str], environment: dict[str, str], output: Path) -> None:
        output.touch()
        self._process = _FORKS.Process(target=_become, args=(argv, environment, output), daemon=True)
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("OMP_NUM_THREADS", "1")  # read when torch is imported
            self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """Exit status, within that time."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"process {self.pid} runs after {timeout_s} s"
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _become(argv: list[str], environment: dict[str, str], output: Path) -> None:
    with output.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.chdir(PROJECT)
    os.environ.update(environment)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


class RankProcesses:
    """World size T x P; rank 0 answers requests, the others are the project's worker, which it starts if told to."""

    def __init__(
        self,
        shards: Path,
        directory: Path,
        tensor: int,
        pipeline: int,
        requests: list[Tensors],
        on_gpu: bool = False,
        starts_others: bool = False,
        model_type: str = "GPT",
        engines: int = 1,
        data_type: str = "fp32",
        has_peer_sums: bool = True,
        is_one_host: bool = True,
        chunk_tokens: int = 256,
        is_together: bool = False,
        speculation: str = "none",
    ) -> None:
        self.answers_file = directory / "answers"
        (directory / "requests").write_bytes(pickle.dumps(requests))
        worker = ["-m", "backends.fastertransformer.worker"]
        numbers = map(str, (tensor, pipeline, engines, int(has_peer_sums), chunk_tokens, int(is_together)))
        leader = [__file__, str(shards), str(directory), model_type, data_type, speculation, *numbers]
        hidden = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        size = tensor * pipeline
        self.processes, self.outputs = [], []
        for rank in range(1 if starts_others else size):
            ranks = {} if starts_others else rank_environment(rank, size, directory, on_gpu, is_one_host)
            self.outputs.append(directory / f"rank{rank}.txt")
            environment = {**ranks, **hidden, "TMPDIR": str(directory)}
            self.processes.append(Program(worker if rank else leader, environment, self.outputs[-1]))

    def wait(self, timeout_s: float) -> list[int]:
        """Exit status of each rank, within that time."""
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(240)

    @property
    def answers(self) -> list[Tensors]:
        found: list[Tensors] = pickle.loads(self.answers_file.read_bytes())  # our own child wrote it
        return found

    @property
    def text(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in self.outputs)


def workers_of(directory: Path) -> list[int]:
    """Processes that an engine has started, which was started with that directory."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            ranks = [word for word in environment.read_bytes().split(b"\0") if word.startswith(b"SLIPWAY_RANKS=")]
            if ranks and f"{directory}/slipway-ranks-".encode() in ranks[0]:
                found.append(int(environment.parent.name))
    return found


def answer_of(engine: Any, tensors: Tensors) -> Tensors:
    """What one request gets; one with START belongs to a conversation."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.submit(engine.parse(tensors), answers.put, session="talk" if "START" in tensors else None)
    found: Tensors = answers.get().tensors
    return found


def answers_together(engine: Any, requests: list[Tensors]) -> list[Tensors]:
    """What requests get of which the first one decodes while the others come."""
    answers: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in requests]
    engine.submit(engine.parse(requests[0]), answers[0].put, is_streaming=True)
    first = answers[0].get()
    for tensors, answer in zip(requests[1:], answers[1:], strict=True):
        engine.submit(engine.parse(tensors), answer.put)
    while not first.is_final:
        first = answers[0].get()
    return [first.tensors, *(answer.get().tensors for answer in answers[1:])]


def _print_inputs(engine: Any) -> None:
    """Print how many tokens of how many rows each prefill pass of an engine runs."""
    extend = engine._steps.extend

    def print_and_run(ids: Any, starts: Any, lengths: Any, *more: Any) -> Any:
        sys.stdout.write(f"prefill of {lengths.tolist()} tokens from {starts.tolist()}\n")
        return extend(ids, starts, lengths, *more)

    engine._steps.extend = print_and_run


def rank_environment(
    rank: int, world_size: int, directory: Path, on_gpu: bool = False, is_one_host: bool = True
) -> dict[str, str]:
    ranks: dict[str, object]
    ranks = {"rank": rank, "world_size": world_size, "local_rank": rank, "local_size": world_size, "timeout_s": 60}
    ranks |= {"silence_s": 30 if on_gpu else 6}  # drivers and compilers hold Python up for seconds
    ranks |= {"rendezvous": str(directory / "rendezvous"), "run": str(directory)}
    ranks |= {} if is_one_host else {"local_rank": 0, "local_size": 1}
    return {"SLIPWAY_RANKS": json.dumps(ranks), "OMP_NUM_THREADS": "1"}


def main(shards: str, directory: str, model_type: str, data_type: str, speculation: str, *numbers: str) -> None:
    sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]
    from backends.fastertransformer.engine.engine import open_engine
    from backends.fastertransformer.engine.model.precision import choose_device
    from backends.fastertransformer.engine.parallel.group import Group
    from backends.fastertransformer.engine.parallel.rank import read_ranks
    from backends.fastertransformer.engine.settings import Settings

    ranks = read_ranks(os.environ)
    device = choose_device(local_rank=ranks.local_rank if ranks else 0)
    tensor, pipeline, engines, has_peer_sums, chunk_tokens, is_together = map(int, numbers)
    settings = Settings(Path(shards), tensor, pipeline, data_type, 1, model_type)
    settings = replace(settings, has_process_per_rank=ranks is None, has_peer_sums=bool(has_peer_sums))
    settings = replace(settings, kv_cache_bytes=CACHE_BYTES, prefill_chunk_tokens=chunk_tokens)
    settings = replace(settings, speculation=speculation)
    answers = []
    for _ in range(engines):
        engine = open_engine(settings, device, Group(ranks, device, settings) if ranks else None)
        requests = pickle.loads((Path(directory) / "requests").read_bytes())
        if is_together:
            _print_inputs(engine)
            answers += answers_together(engine, requests)
        for request in () if is_together else requests:
            answers.append(answer_of(engine, request))
            sys.stdout.write("answered\n")
            sys.stdout.flush()
        sys.stdout.write(f"{engine.metrics.accepted_tokens} of {engine.metrics.draft_tokens} tokens accepted\n")
        engine.close()
    (Path(directory) / "answers").write_bytes(pickle.dumps(answers))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
