"""The comparison of load tools: its formulas by hand, what it reads of other tools' files, and a round of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.load_client_peers import PerfAnalyzer, Times, _of_record
from benchmarks.load_clients import ask, figures_of
from benchmarks.timed_openai import MODEL, timed_api
from evaluation.speed.openai_wire import Dialect
from evaluation.speed.workload import LoadPrompt
from handover.endpoint import Endpoint

MS = 1_000_000
FIRST_S, EACH_S, TOKENS = 0.1, 0.01, 11


def test_the_formulas_by_hand() -> None:
    # Two slots, an answer every 50 ms; the ends of the load, where a slot stood empty, are left out of the rate.
    times = [Times(50 * MS * number, 50 * MS * number + 20 * MS, 50 * MS * (number + 2)) for number in range(8)]
    slow_end = Times(400 * MS, 440 * MS, 900 * MS)
    mean_first, first, mean_last, last, rate = figures_of([*times, slow_end], 2)
    assert (first, last, rate) == (20.0, 100.0, pytest.approx(20.0))
    assert (mean_first, mean_last) == (pytest.approx((8 * 20 + 40) / 9), pytest.approx((8 * 100 + 500) / 9))


def test_a_record_of_aiperf_is_read() -> None:
    line = """{"metadata": {"request_start_ns": 1795435233284587590, "benchmark_phase": "profiling"},
        "metrics": {"time_to_first_token": {"value": 124.23621299999999, "unit": "ms"},
        "request_latency": {"value": 408.27280299999995, "unit": "ms"}}}"""
    times = _of_record(json.loads(line))
    assert (times.first_ns - times.sent_ns) / MS == pytest.approx(124.236, abs=0.01)
    assert (times.last_ns - times.sent_ns) / MS == pytest.approx(408.273, abs=0.01)


def test_ours_and_perf_analyzer_see_the_delays_of_one_server(tmp_path: Path) -> None:
    dialect = Dialect(MODEL, stream_fields={"stream_options": {"include_usage": True}})
    requests = [dialect.encode(LoadPrompt((number, 2, 3), TOKENS), is_streaming=True) for number in range(8)]
    with timed_api(FIRST_S, EACH_S) as url:
        ours = figures_of(ask(Endpoint.read(url), dialect, requests, 2, 12), 2)
        bodies = [json.loads(request.payload) for request in requests]
        theirs = figures_of(PerfAnalyzer(url.removesuffix("/v1"), MODEL, bodies, tmp_path).turn(2, 12), 2)
    whole_ms = 1e3 * (FIRST_S + (TOKENS - 1) * EACH_S)
    for figures in (ours, theirs):
        assert 1e3 * FIRST_S <= figures[1] < 1.25 * 1e3 * FIRST_S
        assert whole_ms <= figures[3] < 1.15 * whole_ms
