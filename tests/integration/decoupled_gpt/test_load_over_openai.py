"""The load generator over Slipway's own OpenAI endpoint, in front of the real tritonserver, beside its way by gRPC.

Oracles: what the engine itself counts, and the same requests by gRPC.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.servers.served import Deployment

from evaluation import benchmark, load, recompute
from evaluation.arguments import BenchmarkArguments
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.tables.raw_records import read_records
from evaluation.speed.tables.table import LOAD_TABLE, STATIC_TABLE, Row
from handover.endpoint import Endpoint

GIVEN, WANTED = 12, 10


def measure(endpoint: str, output: Path) -> list[Row]:
    given = LoadArguments(
        endpoint=endpoint,
        output=output,
        lengths=(f"{GIVEN}/{WANTED}",),
        concurrencies=(2,),
        request_rates=(24.0,),
        requests=48,
        repeats=1,
        min_repeats=1,
        vocab_size=100,
    )
    load.main(given.to_argv())
    return LOAD_TABLE.read(output / "load.csv")


@pytest.fixture
def url(triton: Endpoint) -> str:
    return f"http://127.0.0.1:{triton.openai_port}/v1"


@pytest.mark.clock
def test_a_load_by_http_is_the_load_by_grpc(deployment: Deployment, url: str, tmp_path: Path) -> None:
    by_grpc = measure(str(deployment.endpoint_file), tmp_path / "grpc")
    time.sleep(2)  # until the engine's counters, published five times a second, have this load's last requests
    by_http = measure(url, tmp_path / "http")
    assert [row.endpoint_kind for row in (*by_grpc, *by_http)] == ["triton", "triton", "openai", "openai"]
    for row in by_http:
        assert (row.state, row.failed_requests, row.requests, row.engine) == ("ok", 0, 48, "slipway")
        found = read_records(tmp_path / "http" / row.directory)
        assert found is not None
        assert {(r.input_tokens, r.output_tokens, sum(r.chunk_tokens)) for r in found.records} == {(12, 10, 10)}
        figures = {name: value or 0.0 for name, value in row.figures.items()}
        # The engine's own times are a part of what the client waits for; its counters are read beside the load,
        # a part of a second late where the machine is busy, and are published five times a second: then some requests
        # of the load before are among them, and some of this one are not.
        of_others = abs(figures["server_requests"] - 48) / 48
        assert 0 < figures["server_request_mean_ms"] < figures["e2e_mean_ms"] * (1 + of_others)
        assert 16 < figures["server_requests"] < 80
        assert 0 < figures["ttft_p50_ms"] < figures["e2e_p50_ms"]
    recompute.main([f"--output={tmp_path}"])


def test_whole_answers_and_a_static_sweep(url: str, tmp_path: Path) -> None:
    given = BenchmarkArguments(
        url, tmp_path, batch_sizes=(1, 4), lengths=((GIVEN, WANTED),), warmup=1, repeats=3, vocab_size=100
    )
    benchmark.main(given.to_argv())
    rows = STATIC_TABLE.read(tmp_path / "benchmark.csv")
    assert [(row.state, row.batch_size, row.endpoint_kind) for row in rows] == [
        ("ok", 1, "openai"),
        ("ok", 4, "openai"),
    ]
    found = read_records(tmp_path / rows[1].directory)
    assert found is not None
    assert {record.output_tokens for record in found.records} == {4 * WANTED}
    recompute.main([f"--output={tmp_path}"])
