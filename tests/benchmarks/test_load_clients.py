"""The comparison of load tools: its formulas by hand, what it reads of other tools' files, and a round of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.clients.figures import (
    E2E,
    ITL,
    PARTS,
    RATE,
    TOKEN_RATE,
    TTFT,
    WHOLE_RATE,
    Times,
    figures_of,
    parts_of,
    pauses_ms,
)
from benchmarks.clients.load_clients import ask, times_of
from benchmarks.clients.peers import PerfAnalyzer, _of_record
from benchmarks.clients.timed_openai import MODEL, Exchange, timed_api
from evaluation.speed.prompts.workload import LoadPrompt
from evaluation.speed.transport.openai_wire import Dialect
from handover.endpoint import Endpoint
from handover.errors import ServerError

MS = 1_000_000
FIRST_S, EACH_S, TOKENS = 0.1, 0.01, 11


def test_the_formulas_by_hand() -> None:
    # Two slots that answer together, 100 ms after being asked, and stand empty for 25 ms: 16 answers/s.
    starts = [125 * MS * (number // 2) for number in range(5)]
    times = [Times(start, start + 20 * MS, start + 100 * MS, TOKENS) for start in starts]
    figures = figures_of(times, 2)
    assert (figures[TTFT], figures["ttft mean ms"], figures[E2E], figures["e2e mean ms"]) == (20, 20, 100, 100)
    assert (figures[ITL], figures["pause mean ms"]) == (pytest.approx(8), pytest.approx(25))
    # The fifth answer is no whole round of the slots, and is left out: two answers in the 125 ms after the first two.
    assert (figures[RATE], figures[TOKEN_RATE]) == (pytest.approx(2 / 0.125), pytest.approx(2 * TOKENS / 0.125))
    assert figures[WHOLE_RATE] == pytest.approx(5 / 0.350)
    slow = [*times[:4], Times(250 * MS, 290 * MS, 650 * MS, TOKENS)]
    assert figures_of(slow, 2)["ttft mean ms"] == pytest.approx((4 * 20 + 40) / 5)
    assert figures_of(slow, 2)["e2e mean ms"] == pytest.approx((4 * 100 + 400) / 5)
    assert (figures_of(slow, 2)[TTFT], figures_of(slow, 2)[E2E]) == (20, 100)


def test_a_pause_lasts_from_the_earliest_free_slot_to_the_next_request() -> None:
    # The third request was sent before any of these had ended: its slot was freed by one that is not here.
    asked = [(0, 100), (10, 90), (20, 120), (93, 200), (104, 300), (320, 400)]
    times = [Times(sent * MS, sent * MS, last * MS, 1) for sent, last in asked]
    assert pauses_ms(times) == [3, 4, 200]


def test_the_parts_of_a_latency_by_hand() -> None:
    # The second request is read before the first; the warm-up, read before both, belongs to no request here.
    exchanges = [Exchange(*(ms * MS for ms in each)) for each in ((1, 2, 3), (12, 62, 90), (11, 65, 80))]
    times = [Times(10 * MS, 67 * MS, 82 * MS, 1), Times(10.5 * MS, 66 * MS, 91 * MS, 1)]
    # There: 1 and 1.5; server: 54 and 50; back: 2 and 4; last: 2 and 1; of the client: 57 - 54 and 55.5 - 50.
    by_hand = dict(zip(PARTS, (1.25, 52.0, 3.0, 1.5, 4.25), strict=True))
    expected = {f"{part} {kind} ms": value for kind in ("mean", "p50") for part, value in by_hand.items()}
    assert parts_of(times, exchanges) == pytest.approx(expected), "mean and median of two"
    with pytest.raises(ServerError, match="did not read"):
        parts_of([*times, Times(50 * MS, 60 * MS, 70 * MS, 1)], exchanges)


def test_a_record_of_aiperf_is_read() -> None:
    line = """{"metadata": {"request_start_ns": 1795435233284587590, "benchmark_phase": "profiling"},
        "metrics": {"time_to_first_token": {"value": 124.23621299999999, "unit": "ms"},
        "request_latency": {"value": 408.27280299999995, "unit": "ms"},
        "output_sequence_length": {"value": 20, "unit": "tokens"}}}"""
    times = _of_record(json.loads(line))
    assert (times.first_ns - times.sent_ns) / MS == pytest.approx(124.236, abs=0.01)
    assert (times.last_ns - times.sent_ns) / MS == pytest.approx(408.273, abs=0.01)
    assert times.tokens == 20


def test_ours_and_perf_analyzer_see_the_delays_of_one_server(tmp_path: Path) -> None:
    dialect = Dialect(MODEL, stream_fields={"stream_options": {"include_usage": True}})
    requests = [dialect.encode(LoadPrompt((number, 2, 3), TOKENS), is_streaming=True) for number in range(8)]
    bodies = [json.loads(request.payload) for request in requests]
    with timed_api(FIRST_S, EACH_S) as api:
        our_times = times_of(ask(Endpoint.read(api.url), dialect, requests, 2, 12))
        our_parts = parts_of(our_times, api.take_exchanges())
        their_times = PerfAnalyzer(api.url.removesuffix("/v1"), MODEL, bodies, tmp_path).turn(2, 12)
        their_parts = parts_of(their_times, api.take_exchanges())
        assert api.take_exchanges() == []
    whole_ms = 1e3 * (FIRST_S + (TOKENS - 1) * EACH_S)
    assert {each.tokens for each in (*our_times, *their_times)} == {TOKENS}
    for figures in (figures_of(our_times, 2), figures_of(their_times, 2)):
        assert 1e3 * FIRST_S <= figures[TTFT] < 1.25 * 1e3 * FIRST_S
        assert whole_ms <= figures[E2E] < 1.15 * whole_ms
    for parts in (our_parts, their_parts):
        there_ms, served_ms, back_ms, last_ms, of_client_ms = (parts[f"{part} p50 ms"] for part in PARTS)
        assert 1e3 * FIRST_S - 1 <= served_ms < 1.25 * 1e3 * FIRST_S
        assert min(there_ms, back_ms, last_ms) > 0
        assert max(there_ms, back_ms, last_ms, of_client_ms) < 1e3 * FIRST_S / 4
