"""Load and unload a model through Triton's model control API, again and again, and look at what stays behind.

    python3 -m benchmarks.serving.load_unload --endpoint=results/.../deployment --model=fastertransformer --cycles=50

The deployment must have been started with ``deployment.server_args=[--model-control-mode=explicit,--load-model=*]`` and
``deployment.open_apis=[model_repository]``.
After every load the model answers a request; after every unload its processes and shared memory must be gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc as triton

from benchmarks.serving.server_memory import Holdings, look
from evaluation.client.client import Client
from evaluation.client.request_tensors import prepare_ids
from handover.arguments import ScriptArguments
from handover.endpoint import Endpoint
from handover.errors import ServerError, exit_status

_UNLOAD_TIMEOUT_S = 240


@dataclass(frozen=True)
class LoadUnloadArguments(ScriptArguments):
    """What to load and how often."""

    endpoint: str = field(metadata={"help": "endpoint.json or its directory"})
    model: str = field(default="fastertransformer", metadata={"help": "to be loaded and unloaded; it takes token ids"})
    cycles: int = field(default=50, metadata={"help": "how often"})


def cycle(endpoint: Endpoint, model: str, cycles: int) -> Iterator[tuple[Holdings, Holdings]]:
    """Load and unload a model; give what the deployment holds with the model and without it, cycle by cycle.

    Raises:
        ServerError: an answer differs from the first one, or the model does not go away.
    """
    assert endpoint.pid is not None  # of a deployment of ours
    expected: tuple[int, ...] | None = None
    with triton.InferenceServerClient(endpoint.grpc_url) as control, Client(endpoint.grpc_url) as client:
        for _ in range(cycles):
            control.load_model(model)
            (generation,) = client.generate(prepare_ids([[5, 6, 7]], 8), model)
            expected = expected or generation.tokens
            if generation.tokens != expected:
                raise ServerError(f"after a reload '{model}' answers {generation.tokens} instead of {expected}")
            loaded = look(endpoint.pid)
            control.unload_model(model)
            yield loaded, _wait_until_gone(endpoint.pid, loaded)


def _wait_until_gone(pid: int, loaded: Holdings) -> Holdings:
    """The API answers before the last process has ended."""
    deadline = time.monotonic() + _UNLOAD_TIMEOUT_S
    while (now := look(pid)).stubs >= loaded.stubs:
        if time.monotonic() > deadline:
            raise ServerError(f"{_UNLOAD_TIMEOUT_S} s after the unload the model's process is still there")
        time.sleep(0.1)
    return now


def main(argv: Sequence[str]) -> None:
    """Print what is held after some of the cycles, and how much the memory grew behind the first tenth of them."""
    arguments = LoadUnloadArguments.from_argv(argv, __doc__)
    endpoint = Endpoint.read(arguments.endpoint)
    shown = {round(number) for number in np.linspace(1, arguments.cycles, 6)}
    unloaded = []
    for number, (loaded, gone) in enumerate(cycle(endpoint, arguments.model, arguments.cycles), 1):
        unloaded.append(gone)
        if number in shown:
            print(f"cycle {number:3}  loaded    {loaded}\n           unloaded  {gone}", flush=True)
    settled = unloaded[arguments.cycles // 10]
    print(f"growth     tritonserver {unloaded[-1].server_mb - settled.server_mb:+.1f} MB over the last nine tenths")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "load_unload"))
