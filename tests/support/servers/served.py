"""A real deployment for tests: ``python -m deployment.serve`` in a process of its own, and what is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton_grpc
from tritonclient.utils import np_to_triton_dtype

from deployment.arguments import ServeArguments
from handover.endpoint import Endpoint
from support import PATIENCE_S

PROJECT = Path(__file__).resolve().parents[3]
# Of Triton's Python backend, once in some hundred starts on busy cores, and what is said of it; see docs/serving.md.
_BUS_ERROR = "Fatal Python error: Bus error"


class Deployment:
    """A serve process on a repository; its state lies in ``directory``."""

    def __init__(self, repository: Path, directory: Path, parent: tuple[str, ...] = (), **settings: Any) -> None:
        self.repository, self.directory = repository, directory
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "server.log"
        self.endpoint_file = directory / "endpoint.json"
        arguments = ServeArguments(repository, self.endpoint_file, self.log, **settings)
        self.prefix, self.private = "", Path("/nonexistent")
        self.output = directory / "output.txt"
        with self.output.open("wb") as stream:
            self.process = subprocess.Popen(
                [*parent, sys.executable, "-m", "deployment.serve", *arguments.to_argv()],
                cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait_until_published(self, timeout_s: float = 2 * PATIENCE_S) -> Endpoint:
        wait_for(lambda: "serving" in self.text or self.process.poll() is not None, timeout_s)
        assert self.process.poll() is None, self.text
        assert self._has_noted_itself()
        return Endpoint.read(self.endpoint_file)

    def wait_for_failed_start(self, timeout_s: float) -> int:
        """Wait for the exit status of a start that fails after it has noted what it creates."""
        wait_for(lambda: self._has_noted_itself() or self.process.poll() is not None, timeout_s)
        assert self.prefix, self.text
        return self.process.wait(timeout_s)

    def _has_noted_itself(self) -> bool:
        """Learn from the supervisor's note what it creates; the prefix tells it from other deployments' regions."""
        try:
            state = json.loads((self.directory / ".endpoint.json.state").read_text())
        except FileNotFoundError:
            return False
        self.prefix, self.private = state["prefix"], Path(state["directory"])
        return True

    def begin_to_stop(self) -> None:
        """Ask it to stop while other tests run: Triton takes three seconds. ``assert_all_stopped`` looks at its end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            _STOPPING.append(self)

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 180) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.end(timeout_s)

    def end(self, timeout_s: float = 180) -> int:
        status = self.process.wait(timeout_s)
        assert_no_crash(self.directory, self.text)
        return status

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def processes(self) -> dict[int, str]:
        """Supervisor, helper, server and stubs: everything that names our directory or the unique prefix."""
        marks = [str(self.directory), *filter(None, [self.prefix])]
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().decode(errors="replace").replace("\0", " ")
            except OSError:
                continue
            if any(mark in line for mark in marks) and int(path.parent.name) != os.getpid():
                found[int(path.parent.name)] = line
        return found

    def pids_of(self, program: str) -> list[int]:
        return [pid for pid, line in self.processes.items() if program in line.split(" ")[0]]


_STOPPING: list[Deployment] = []


def assert_all_stopped() -> None:
    """Of servers that began to stop: each has ended in good order."""
    while _STOPPING:
        deployment = _STOPPING.pop()
        assert deployment.end() == 0, deployment.text


def deaths_by_signal(directory: Path) -> list[str]:
    """What logs below a directory say of crashes: of stubs Python's fault handler, of the server its supervisor."""
    marks = ("Fatal Python error", "tritonserver was killed by SIGSEGV", "tritonserver was killed by SIGABRT")
    logs = [path for name in ("server*.log", "output.txt") for path in directory.rglob(name)]
    return [
        line
        for log in logs
        for line in log.read_text(errors="replace").splitlines()
        if any(mark in line for mark in marks)
    ]


def assert_no_crash(directory: Path, said: str) -> None:
    """No program of a deployment crashed, or only a stub that Triton had given up, before the start that followed."""
    deaths = deaths_by_signal(directory)
    if deaths == [_BUS_ERROR] and "starting again: " in said:
        warnings.warn("a stub ended by SIGBUS before it had served, and was started again", stacklevel=2)
    else:
        assert deaths == []


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("slipway-", "triton_"))}


def wait_for(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def infer(client: Any, module: Any, model: str, tensors: dict[str, npt.NDArray[Any]], **settings: Any) -> Any:
    """One request over either protocol; ``module`` is tritonclient.grpc or tritonclient.http."""
    return client.infer(model, inputs_of(module, tensors), **settings)


def inputs_of(module: Any, tensors: dict[str, npt.NDArray[Any]]) -> list[Any]:
    """The tensors of a request, as either client library wants them."""
    inputs = []
    for name, array in tensors.items():
        tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def generate(endpoint: Endpoint, prompt: str, length: int) -> str:
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as client:
        tensors = {"INPUT_0": np.array([[prompt]], dtype=object), "INPUT_1": np.array([[length]], np.uint32)}
        result = infer(client, triton_grpc, "ensemble", tensors)
        return str(result.as_numpy("OUTPUT_0")[0].decode())
