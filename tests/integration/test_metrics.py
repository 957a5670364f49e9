"""The engine's metrics on the port of a real tritonserver, against what the load generator counted of its requests."""

from __future__ import annotations

import json
import math
import queue
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from support.servers.prometheus import Prometheus
from support.servers.served import Deployment, inputs_of, wait_for
from tritonclient.utils import InferenceServerException

from evaluation import load, recompute
from evaluation.monitor.published import write_metrics
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.tables.raw_records import read_records
from evaluation.speed.tables.record import RequestRecord
from evaluation.speed.tables.table import LOAD_TABLE
from evaluation.speed.transport.wire import Encoded, Wire
from evaluation.tasks.metric import LOWER, Metric
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from handover.endpoint import Endpoint

DESCRIPTION = """num_layers: 4
hidden_size: 256
ffn_hidden_size: 1024
num_attention_heads: 4
max_position_embeddings: 1024
encoder_seq_length: 1024
vocab_size: 1024
layernorm_epsilon: 1.0e-05
activation: gelu
position_embedding_type: learned_absolute
share_embeddings_and_output_weights: true
"""
INPUT, OUTPUT, NEVER = 12, 40, 2**31 - 1
DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "slipway.json"
MONITORED = "evidence", "most_evidence", "rms_difference", "rms_of_formats"
LABELS = 'model_name="fastertransformer"'


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("metrics")
    description, repository = directory / "model_config.yaml", directory / "model_repo"
    description.write_text(DESCRIPTION)
    convert(ConvertArguments(description, directory / "1-gpu", 1, "fp32", random_weights=True))
    settings = ExportArguments(directory / "1-gpu", repository, "gpt", 1, 1, "fp32", 0, 0, max_batch_size=4)
    build_repository(replace(settings, decoupled=True))
    running = Deployment(repository, directory / "run", openai_port=0)
    running.wait_until_published()
    yield running
    running.begin_to_stop()


@pytest.fixture
def endpoint(deployment: Deployment) -> Endpoint:
    return Endpoint.read(deployment.endpoint_file)


def read(endpoint: Endpoint) -> str:
    with urlopen(f"http://127.0.0.1:{endpoint.metrics_port}/metrics", timeout=180) as answer:
        return str(answer.read().decode())


def value(endpoint: Endpoint, name: str, label: str = "") -> float:
    """The sum of a metric's series that have a label."""
    return sum_of(read(endpoint), name, label)


def sum_of(text: str, name: str, label: str = "") -> float:
    lines = re.findall(rf"^vllm:{name}\{{([^}}]*)\}} (\S+)$", text, re.MULTILINE)
    assert lines, name
    return sum(float(found) for labels, found in lines if LABELS in labels and label in labels)


def test_sums_are_those_of_the_load_generator(
    endpoint: Endpoint, deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed loop, streams; the client counts every request, those of its warm-up and its probe too."""
    records: list[RequestRecord] = []
    ask = Wire.ask

    async def noting(wire: Wire, request: Encoded, scheduled_ns: int) -> RequestRecord:
        records.append(await ask(wire, request, scheduled_ns))
        return records[-1]

    monkeypatch.setattr(Wire, "ask", noting)
    arguments = LoadArguments(
        str(deployment.endpoint_file), tmp_path, lengths=(f"{INPUT}/uniform:20:{OUTPUT}",), concurrencies=(3, 6),
        requests=20, repeats=1, min_repeats=1,
    )  # fmt: skip
    wait_for(lambda: value(endpoint, "e2e_request_latency_seconds_count") > 0)  # the deployment's own request
    time.sleep(0.5)
    before = read(endpoint)
    load.main(arguments.to_argv())
    count = len(records)
    assert count > 40 and not any(record.error for record in records)
    ended = sum_of(before, "e2e_request_latency_seconds_count") + count
    wait_for(lambda: value(endpoint, "e2e_request_latency_seconds_count") == ended)
    finished = sum_of(before, "request_success_total") + count
    wait_for(lambda: value(endpoint, "request_success_total") == finished)
    time.sleep(0.5)  # until the rest is published
    after = read(endpoint)

    def risen(name: str, label: str = "") -> float:
        return sum_of(after, name, label) - sum_of(before, name, label)

    tokens = sum(record.output_tokens for record in records)
    assert risen("request_success_total", 'finished_reason="length"') == count
    assert risen("request_success_total") == count
    assert risen("prompt_tokens_total") == risen("request_prompt_tokens_sum") == count * INPUT
    assert risen("generation_tokens_total") == risen("request_generation_tokens_sum") == tokens
    assert risen("iteration_tokens_total_sum") == count * INPUT + tokens
    assert risen("inter_token_latency_seconds_count") == tokens - count
    for name in ("time_to_first_token", "request_queue_time", "request_time_per_output_token"):
        assert risen(f"{name}_seconds_count") == count
        assert risen(f"{name}_seconds_bucket", 'le="+Inf"') == count
    clients = {
        "e2e_request_latency_seconds_sum": sum(record.done_ns - record.sent_ns for record in records) / 1e9,
        "time_to_first_token_seconds_sum": sum(record.chunk_ns[0] - record.sent_ns for record in records) / 1e9,
    }
    for name, seconds in clients.items():
        served = risen(name)
        # What the client sees beyond that is the way there and back; a busy host's is long.
        assert served < seconds < 1.01 * served + 0.5 * count
    parts = [risen(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert sum(parts) == pytest.approx(risen("e2e_request_latency_seconds_sum"), rel=0.01)
    decoding = risen("inter_token_latency_seconds_sum")
    assert decoding == pytest.approx(risen("request_decode_time_seconds_sum"), rel=1e-3)
    assert sum_of(after, "num_requests_running") == sum_of(after, "num_requests_waiting") == 0


def test_a_requests_times_begin_when_it_came_to_this_host(endpoint: Endpoint) -> None:
    """Whoever passes it on, as the OpenAI endpoint does, says when that was; Triton passes this to the engine."""
    boot_id, earlier_s = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), 40.0
    column = np.ones((1, 1), np.uint32)
    tensors = {
        "input_ids": np.full((1, 3), 5, np.uint32),
        "input_lengths": column * 3,
        "request_output_len": column * 4,
        "end_id": column * NEVER,
    }
    names = [f"{name}_seconds" for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time")]
    time.sleep(0.5)  # until the test before is published
    before = read(endpoint)
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    sent_s = time.monotonic()
    arrival = f"{boot_id}/{int((sent_s - earlier_s) * 1e9)}"
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        inputs = inputs_of(triton_grpc, tensors)
        client.async_stream_infer("fastertransformer", inputs, parameters={"slipway_arrival": arrival})
        length = 0
        while length < 3 + 4:  # an answer that is late gives way to a newer one
            result, error = arrived.get(timeout=180)
            assert error is None
            length = int(result.as_numpy("sequence_length")[0, 0])
    took_s = time.monotonic() - sent_s

    def is_counted(name: str) -> bool:
        return value(endpoint, f"{name}_count") > sum_of(before, f"{name}_count")

    for name in names:
        wait_for(partial(is_counted, name))
        counted_s = value(endpoint, f"{name}_sum") - sum_of(before, f"{name}_sum")
        assert earlier_s < counted_s < earlier_s + took_s
    decoding = "request_decode_time_seconds_sum"
    assert value(endpoint, decoding) - sum_of(before, decoding) < took_s


def test_what_is_under_way_shows_and_what_was_cancelled_counts_as_such(endpoint: Endpoint) -> None:
    before = value(endpoint, "request_success_total", 'finished_reason="abort"')
    finished = value(endpoint, "e2e_request_latency_seconds_count")
    arrived: queue.SimpleQueue[object] = queue.SimpleQueue()
    column = np.ones((6, 1), np.uint32)  # rows
    tensors = {
        "input_ids": np.full((6, 3), 5, np.uint32),
        "input_lengths": column * 3,
        "request_output_len": column * 400,
        "end_id": column * NEVER,
    }
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as client:
        client.start_stream(lambda result, error: arrived.put(error))
        client.async_stream_infer("fastertransformer", inputs_of(triton_grpc, {k: v[:4] for k, v in tensors.items()}))
        assert arrived.get(timeout=180) is None
        wait_for(lambda: value(endpoint, "num_requests_running") == 4)
        assert 0 < value(endpoint, "kv_cache_usage_perc") < 1
        client.stop_stream(cancel_requests=True)
    wait_for(lambda: value(endpoint, "request_success_total", 'finished_reason="abort"') == before + 4)
    wait_for(lambda: value(endpoint, "num_requests_running") == 0)
    assert value(endpoint, "e2e_request_latency_seconds_count") == finished


def test_hang_ups_over_openais_api_free_the_engine_and_count_as_aborts(endpoint: Endpoint, tmp_path: Path) -> None:
    reasons = {name: f'finished_reason="{name}"' for name in ("abort", "length")}
    before = {name: value(endpoint, "request_success_total", label) for name, label in reasons.items()}
    tokens = value(endpoint, "generation_tokens_total")
    arguments = LoadArguments(
        f"http://127.0.0.1:{endpoint.openai_port}/v1", tmp_path, lengths=(f"{INPUT}/200",), concurrencies=(3,),
        requests=24, repeats=1, min_repeats=1, vocab_size=1000, cancel_share=0.6,
    )  # fmt: skip
    load.main(arguments.to_argv())
    (row,) = LOAD_TABLE.read(tmp_path / "load.csv")
    found = read_records(tmp_path / row.directory)
    assert found is not None
    records = (*found.warmups, *found.records)
    cancelled, whole = (sum(each) for each in zip(*((r.is_cancelled, r.is_complete) for r in records), strict=True))
    assert (row.state, row.failed_requests, row.error) == ("ok", 0, "")
    assert row.cancelled_requests is not None and 8 <= row.cancelled_requests <= cancelled
    assert row.figures["server_idle_s"] is not None and row.figures["server_idle_s"] < 5

    def ended(reason: str) -> float:
        return value(endpoint, "request_success_total", reasons[reason]) - before[reason]

    # Those that were in flight when the repeat ended are not recorded.
    wait_for(lambda: cancelled <= ended("abort") <= cancelled + 3)
    made = value(endpoint, "generation_tokens_total") - tokens
    assert made < 200 * ended("length") + 20 * ended("abort"), "a request that is hung up on makes few tokens more"
    assert whole <= ended("length")
    recompute.main([f"--output={tmp_path}"])


def test_prometheus_sees_types_and_the_cache(endpoint: Endpoint) -> None:
    text = read(endpoint)
    types = dict(re.findall(r"^# TYPE vllm:(\w+) (\w+)$", text, re.MULTILINE))
    assert types["e2e_request_latency_seconds"] == types["time_to_first_token_seconds"] == "histogram"
    assert types["inter_token_latency_seconds_bucket"] == types["prompt_tokens_total"] == "counter"
    assert types["num_requests_running"] == types["kv_cache_usage_perc"] == "gauge"
    assert "nv_inference_request_success" in text
    info = re.search(r"^vllm:cache_config_info\{([^}]*)\} 1$", text, re.MULTILINE)
    assert info and 'block_size="32"' in info[1] and re.search(r'num_gpu_blocks="\d+"', info[1])
    assert re.search(r'^vllm:num_requests_running\{engine="0",model_name="fastertransformer"\} 0$', text, re.MULTILINE)


def test_a_refusal_is_logged_by_the_clients_name_for_the_request(endpoint: Endpoint, deployment: Deployment) -> None:
    column = np.ones((1, 1), np.uint32)
    tensors = {
        "input_ids": np.full((1, 3), 5, np.uint32),
        "input_lengths": column * 3,
        "request_output_len": column * 100_000,
    }
    arrived: queue.SimpleQueue[object] = queue.SimpleQueue()
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as client:
        client.start_stream(lambda result, error: arrived.put(error))
        client.async_stream_infer("fastertransformer", inputs_of(triton_grpc, tensors), request_id="job 7, line 12")
        assert isinstance(arrived.get(timeout=180), InferenceServerException)
    wait_for(lambda: "request 'job 7, line 12': INVALID_ARG: " in deployment.log.read_text())


class PlainText(SimpleHTTPRequestHandler):
    """Serves a directory's files as node_exporter does what its textfile collector has read."""

    def guess_type(self, path: Any) -> str:
        return "text/plain; version=0.0.4"

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def prometheus(endpoint: Endpoint, tmp_path: Path) -> Iterator[Prometheus]:
    """It reads the server's metrics and the monitor's file."""
    monitored = tmp_path / "collected" / "metrics"
    of_run = [Metric(name, 0.5, "nats", None, 1, 0, "of a run", LOWER) for name in MONITORED]
    write_metrics(monitored, "fastertransformer", of_run, 1, 1000.0, "")
    collector = ThreadingHTTPServer(("127.0.0.1", 0), partial(PlainText, directory=str(monitored.parent)))
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    targets = [f"127.0.0.1:{each}" for each in (endpoint.metrics_port, collector.server_port)]
    with Prometheus([{"targets": targets}], tmp_path) as started:
        yield started
    collector.shutdown()
    collector.server_close()


def test_every_panel_of_the_dashboard_shows_what_a_real_prometheus_has_read(
    endpoint: Endpoint, deployment: Deployment, prometheus: Prometheus, tmp_path: Path
) -> None:
    checked = subprocess.run(["promtool", "check", "metrics"], input=read(endpoint), capture_output=True, text=True)
    assert checked.returncode in (0, 3), checked.stderr  # 3: style, such as the colon in vLLM's names
    wait_for(lambda: prometheus.query("up") == [1.0, 1.0])
    arguments = LoadArguments(
        str(deployment.endpoint_file), tmp_path / "load", lengths=("40/20",), concurrencies=(6,),
        requests=40, repeats=1, min_repeats=1,
    )  # fmt: skip
    load.main(arguments.to_argv())
    time.sleep(1.5)  # until Prometheus has read the last numbers
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    empty = {}
    for expression in [target["expr"] for panel in panels for target in panel["targets"]]:
        found = prometheus.query(expression.replace("$model_name", ".*").replace("$__rate_interval", "1m"))
        if not found or not all(map(math.isfinite, found)):
            empty[expression] = found
    assert len(panels) == 20 and not empty
    selected = 'vllm:%s{model_name="fastertransformer"}'
    for name in ("request_generation_tokens", "inter_token_latency_seconds"):
        (median,) = prometheus.query(f"histogram_quantile(0.5, sum by (le) ({selected % f'{name}_bucket'}))")
        assert median == pytest.approx(20, abs=10) if name.startswith("request") else 0 < median < 1
