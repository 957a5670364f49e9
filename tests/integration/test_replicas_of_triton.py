"""Two tritonservers with their OpenAI endpoints behind a real HAProxy: asked in every way, killed, restarted."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from support.servers.replicated import Clients, Replicated, Stream, noted_as_run, stopped_at_last
from support.servers.served import inputs_of, wait_for
from tritonclient.utils import InferenceServerException

from benchmarks.serving.made_up_repository import write_repository
from deployment.arguments import ServeArguments
from launcher.submit.restarting import restart

pytestmark = pytest.mark.long
BODY = {"model": "fastertransformer", "prompt": list(range(40, 60)), "temperature": 0, "ignore_eos": True}
SUCCESS = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="fastertransformer"}'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicated]:
    place = tmp_path_factory.mktemp("replicas")
    (place / "made_up").mkdir()
    repository = write_repository(place / "made_up", (2, 64, 2), "fp32", 1 << 26)
    files = place / "deployment" / "endpoint.json", place / "deployment" / "server.log"
    server = ServeArguments(repository, *files, openai_port=0, restart=1, guard="always")
    with stopped_at_last(Replicated(server, BODY, lasting=True)) as served:
        yield served


def generate(served: Replicated, length: int) -> tuple[list[int], str]:
    """Ask over a gRPC stream, and return the ids of its last answer and its error."""
    answers: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
    values = {"input_ids": [[40, 41, 42]], "input_lengths": [[3]], "request_output_len": [[length]]}
    tensors = {name: np.array(given, np.uint32) for name, given in values.items()}
    found: list[int] = []
    with triton_grpc.InferenceServerClient(served.endpoint.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            "fastertransformer", inputs_of(triton_grpc, tensors), enable_empty_final_response=True
        )
        while True:
            answer, error = answers.get(timeout=120)
            if error is not None:
                return found, str(error.status())
            output = answer.as_numpy("output_ids")
            found = found if output is None or not output.size else output.flatten().tolist()
            if answer.get_response().parameters["triton_final_response"].bool_param:
                return found, ""


def test_every_door_leads_to_both_and_the_metrics_are_their_sum(served: Replicated) -> None:
    endpoint, before = served.endpoint, served.metrics()
    answered = [generate(served, 6) for _ in range(4)]
    assert len(answered[0][0]) >= 9 and all(each == answered[0] for each in answered)
    with triton_http.InferenceServerClient(f"{endpoint.host}:{endpoint.http_port}") as client:
        assert client.is_model_ready("fastertransformer")
    streams = [Stream(served, max_tokens=6) for _ in range(4)]
    for stream in streams:
        stream.join()
    assert all(stream.is_whole for stream in streams)
    wait_for(lambda: served.metrics()[SUCCESS] - before.get(SUCCESS, 0) == len(answered) + len(streams))
    pages = [name for name in served.metrics() if name.startswith("vllm:kv_cache_usage_perc")]
    assert len(pages) == 2 and all('replica="' in name for name in pages)


def test_a_killed_tritonserver_costs_its_own_streams_alone(served: Replicated) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(generate, served, 900) for _ in range(4)]
        streams = [Stream(served, max_tokens=900) for _ in range(4)]
        wait_for(lambda: all(stream.events for stream in streams))
        os.kill(served.pids_of("tritonserver")[0], signal.SIGKILL)
        errors = [each.result()[1] for each in asked]
        for stream in streams:
            stream.join()
    assert [stream.is_whole for stream in streams].count(True) == 2
    assert errors.count("") == 2
    assert {error for error in errors if error} <= {"StatusCode.UNAVAILABLE", "StatusCode.CANCELLED",
                                                    "StatusCode.INTERNAL"}  # fmt: skip
    wait_for(lambda: served.serving() == 2)


def test_a_rolling_restart_loses_no_request(served: Replicated) -> None:
    clients, errors, is_over = Clients(served, 3, max_tokens=30), list[str](), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            errors.append(generate(served, 30)[1])

    thread = threading.Thread(target=ask)
    thread.start()
    said = list(restart(noted_as_run(served)))
    is_over.set()
    thread.join()
    streams = clients.end()
    assert all(stream.is_whole for stream in streams), {stream.error for stream in streams}
    assert errors and not any(errors), set(errors)
    assert said[-1].startswith("  restarted")
