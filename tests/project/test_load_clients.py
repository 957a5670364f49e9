"""The comparison of load tools: its formulas by hand, what it reads of other tools' files, and a round of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.load_client_peers import PerfAnalyzer, Times, _of_record
from benchmarks.load_clients import ask, figures_of, parts_of
from benchmarks.timed_openai import MODEL, Exchange, timed_api
from evaluation.speed.openai_wire import Dialect
from evaluation.speed.workload import LoadPrompt
from handover.endpoint import Endpoint
from handover.errors import ServerError

MS = 1_000_000
FIRST_S, EACH_S, TOKENS = 0.1, 0.01, 11


def test_the_formulas_by_hand() -> None:
    # Two slots, an answer every 50 ms; the ends of the load, where a slot stood empty, are left out of the rate.
    times = [Times(50 * MS * number, 50 * MS * number + 20 * MS, 50 * MS * (number + 2)) for number in range(8)]
    slow_end = Times(400 * MS, 440 * MS, 900 * MS)
    mean_first, first, mean_last, last, rate = figures_of([*times, slow_end], 2)
    assert (first, last, rate) == (20.0, 100.0, pytest.approx(20.0))
    assert (mean_first, mean_last) == (pytest.approx((8 * 20 + 40) / 9), pytest.approx((8 * 100 + 500) / 9))


def test_the_parts_of_a_latency_by_hand() -> None:
    # The second request is read before the first; the warm-up, read before both, belongs to no request here.
    exchanges = [Exchange(*(ms * MS for ms in each)) for each in ((1, 2, 3), (12, 62, 90), (11, 65, 80))]
    times = [Times(10 * MS, 67 * MS, 82 * MS), Times(10.5 * MS, 66 * MS, 91 * MS)]
    # There: 1 and 1.5; server: 54 and 50; back: 2 and 4; last: 2 and 1; of the client: 57 - 54 and 55.5 - 50.
    assert parts_of(times, exchanges) == pytest.approx((1.25, 52.0, 3.0, 1.5, 4.25) * 2), "mean and median of two"
    with pytest.raises(ServerError, match="did not read"):
        parts_of([*times, Times(50 * MS, 60 * MS, 70 * MS)], exchanges)


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
    bodies = [json.loads(request.payload) for request in requests]
    with timed_api(FIRST_S, EACH_S) as api:
        our_times = ask(Endpoint.read(api.url), dialect, requests, 2, 12)
        our_parts = parts_of(our_times, api.take_exchanges())
        their_times = PerfAnalyzer(api.url.removesuffix("/v1"), MODEL, bodies, tmp_path).turn(2, 12)
        their_parts = parts_of(their_times, api.take_exchanges())
        assert api.take_exchanges() == []
    ours, theirs = figures_of(our_times, 2), figures_of(their_times, 2)
    whole_ms = 1e3 * (FIRST_S + (TOKENS - 1) * EACH_S)
    for figures in (ours, theirs):
        assert 1e3 * FIRST_S <= figures[1] < 1.25 * 1e3 * FIRST_S
        assert whole_ms <= figures[3] < 1.15 * whole_ms
    for there_ms, served_ms, back_ms, last_ms, of_client_ms in (our_parts[5:], their_parts[5:]):
        assert 1e3 * FIRST_S - 1 <= served_ms < 1.25 * 1e3 * FIRST_S
        assert min(there_ms, back_ms, last_ms) > 0
        assert max(there_ms, back_ms, last_ms, of_client_ms) < 1e3 * FIRST_S / 4
