"""Triton models for measuring clients: one that answers at once, one that answers after a fixed time.

The first answers from the server's response cache, without a backend being asked again. The second computes nothing
either: a timer answers each request, so that what else runs on the machine hardly changes its latency.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from deployment.doors.ports import choose_ports
from deployment.triton.installation import SLIPWAY, assemble_backends, locate
from evaluation.client.client import Client
from evaluation.client.request_tensors import prepare_ids
from handover.errors import ServerError

_START_TIMEOUT_S = 60.0
_CONFIG = """backend: "python"
max_batch_size: 8
response_cache {{ enable: {caches} }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
input [ {inputs} ]
output [
  {{ name: "output_ids" data_type: TYPE_UINT32 dims: [ -1, -1 ] }},
  {{ name: "sequence_length" data_type: TYPE_UINT32 dims: [ -1 ] }}
]
"""
_INPUTS = {
    **dict.fromkeys(("input_lengths", "request_output_len", "runtime_top_k", "end_id"), "UINT32"),
    **dict.fromkeys(("runtime_top_p", "temperature", "repetition_penalty"), "FP32"),
    "random_seed": "UINT64",
}
_MODEL = '''"""Continues each prompt with zeros, without computing anything, after a fixed time."""
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

DELAY_S = {delay_s}


class TritonPythonModel:
    def execute(self, requests):
        if not DELAY_S:
            return [self.answer(request) for request in requests]
        for request in requests:
            threading.Timer(DELAY_S, self.send, (request.get_response_sender(), self.answer(request))).start()

    def answer(self, request):
        ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
        wanted = pb_utils.get_input_tensor_by_name(request, "request_output_len").as_numpy()
        whole = np.pad(ids, ((0, 0), (0, int(wanted.max()))))[:, None, :].astype(np.uint32)
        lengths = (ids.shape[1] + wanted).astype(np.uint32)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("output_ids", whole), pb_utils.Tensor("sequence_length", lengths)]
        )

    def send(self, sender, response):
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''


@contextlib.contextmanager
def timed_server(model: str, delay_s: float, cores: Sequence[int]) -> Iterator[str]:
    """Serve a model on some cores while the block runs; give ``host:port`` of its gRPC.

    Args:
        model: its name.
        delay_s: of each answer; 0: it comes from the response cache.
        cores: for the server.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        installation = locate(SLIPWAY)
        backends = assemble_backends(installation, directory)
        _write_repository(directory / "models" / model, delay_s)
        ports = choose_ports("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0})
        argv = [
            *(str(installation.binary), f"--model-repository={directory / 'models'}"),
            *(f"--backend-directory={backends}", "--allow-gpu-metrics=false", "--allow-http=false"),
            *("--grpc-address=127.0.0.1", f"--grpc-port={ports.grpc}", "--allow-metrics=false"),
            *("--disable-auto-complete-config", "--exit-timeout-secs=5"),
            *("--cache-config=local,size=16777216", f"--cache-directory={installation.binary.parents[1] / 'caches'}"),
        ]
        environment = {**os.environ, **installation.environment}
        with (directory / "server.log").open("wb") as log:
            server = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
        try:
            os.sched_setaffinity(server.pid, cores)
            url = f"127.0.0.1:{ports.grpc}"
            _wait(server, url, model, directory / "server.log")
            yield url
        finally:
            server.terminate()
            server.wait()


def _write_repository(directory: Path, delay_s: float) -> None:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").write_text(_MODEL.format(delay_s=delay_s))
    tensors = [f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ 1 ] }}' for name, kind in _INPUTS.items()]
    tensors.append('{ name: "input_ids" data_type: TYPE_UINT32 dims: [ -1 ] }')
    (directory / "config.pbtxt").write_text(_CONFIG.format(inputs=", ".join(tensors), caches=str(not delay_s).lower()))


def _wait(server: subprocess.Popen[bytes], url: str, model: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    with Client(url, retries=0) as client:
        while time.monotonic() < deadline and server.poll() is None:
            if client.is_live():
                with contextlib.suppress(ServerError):
                    client.generate(prepare_ids([[1, 2]], 1, end_id=0), model)
                    return
            time.sleep(0.2)
    raise ServerError(f"the server did not start: {log.read_text(errors='replace')[-800:]}")
