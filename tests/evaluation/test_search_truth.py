"""How often the search for the highest rate is right: simulated queues whose true rate queueing theory gives.

CI runs some searches; ``-m long`` runs a hundred of each kind, of which 95 must be right.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from support.measurements.simulated_queue import (
    DETERMINISTIC,
    EXPONENTIAL,
    Queue,
    probe,
    search,
    search_arguments,
    true_rate,
)

from evaluation.speed.rate_search import CONFIDENCE, FAILED, RateSearch
from evaluation.speed.tables.slo_verdict import EXCEEDED, HOLDS, UNDECIDED
from evaluation.speed.tables.table import Row

KINDS = [
    (DETERMINISTIC, 50.0, 90.0),
    (EXPONENTIAL, 50.0, 90.0),
    (DETERMINISTIC, 80.0, 99.0),
    (EXPONENTIAL, 200.0, 99.0),
]


def is_right(system: str, limit_ms: float, percentile: float, durations_s: tuple[float, float], seed: int) -> bool:
    """Search once, and say whether the true rate lies between what was found."""
    given, random = search_arguments(limit_ms, percentile, *durations_s), np.random.default_rng([seed, 77])
    found, truth = search(given, system, random), true_rate(system, limit_ms, percentile)
    assert found.rate_per_s is not None and found.exceeded_at_per_s is not None
    assert found.is_confirmed
    assert 0.5 * truth < found.rate_per_s and found.exceeded_at_per_s < 1.6 * truth, "an interval that says something"
    return found.rate_per_s <= truth <= found.exceeded_at_per_s


@pytest.mark.parametrize(("system", "limit_ms", "percentile"), KINDS[:2])
def test_the_true_rate_lies_between_what_holds_and_what_is_exceeded(
    system: str, limit_ms: float, percentile: float
) -> None:
    assert all(is_right(system, limit_ms, percentile, (8.0, 40.0), seed) for seed in range(4))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("system", "limit_ms", "percentile"), KINDS)
def test_of_a_hundred_searches_as_many_are_right_as_the_search_says(
    system: str, limit_ms: float, percentile: float
) -> None:
    right = sum(is_right(system, limit_ms, percentile, (60.0, 600.0), seed) for seed in range(2000, 2100))
    assert right >= 100 * CONFIDENCE


def test_the_truth_of_theory_is_that_of_a_long_simulation() -> None:
    for system, limit_ms, percentile in KINDS:
        queue = Queue(system, true_rate(system, limit_ms, percentile), np.random.default_rng(4))
        for _ in range(60):
            queue.extend()
        share = np.mean((queue.ended - queue.arrived) * 1000 <= limit_ms)
        assert share == pytest.approx(percentile / 100, abs=0.2 * (1 - percentile / 100))


def at(rate: float, second: bool = False) -> Row:
    return Row(mode="open", request_rate_per_s=rate, probe=2 if second else None)


def test_what_was_exceeded_once_holds_only_after_the_whole_time() -> None:
    given = search_arguments(50.0, 90.0, 10.0, 40.0)
    for second, lasted_s in ((False, 10.0), (True, 40.0)):
        row = probe(given, DETERMINISTIC, at(50.0, second), np.random.default_rng(1))
        assert row.slo_verdict == HOLDS
        assert row.figures["lasted_s"] == pytest.approx(lasted_s, rel=0.15)


def test_no_rate_is_given_up_before_a_quarter_of_the_duration() -> None:
    """Far above the server's capacity; before, 60 requests were enough, which is half a second here."""
    given = search_arguments(50.0, 90.0, 20.0, 80.0)
    row = probe(given, DETERMINISTIC, at(120.0), np.random.default_rng(1))
    assert row.slo_verdict == EXCEEDED
    assert 5.0 <= row.figures["lasted_s"] < 20.0  # type: ignore[operator]


def test_what_a_late_client_may_have_delayed_itself_is_not_exceeded() -> None:
    """75.8 requests/s keep the limit, 85 exceed it by less than the larger lag, 120 by far more than that."""
    given = search_arguments(50.0, 90.0, 20.0, 80.0)
    cases = [(85.0, 4.0, EXCEEDED, "e2e"), (85.0, 90.0, UNDECIDED, "client_lag"), (120.0, 90.0, EXCEEDED, "e2e")]
    for rate, lag_ms, verdict, limit in cases:
        row = probe(given, DETERMINISTIC, at(rate), np.random.default_rng(1), round(lag_ms * 1e6))
        assert (row.slo_verdict, row.slo_limit) == (verdict, limit)
        if verdict == UNDECIDED:
            measured = dataclasses.replace(row, state="ok", requests=9, duration_s=8.0)
            assert "undecided whether the SLOs hold (client_lag)" in measured.validity_reasons


def run_search(verdicts: dict[float, list[str]], otherwise: float) -> tuple[RateSearch, list[float]]:
    """Search where some rates have given verdicts, one after another; others hold up to a rate."""
    found, asked = RateSearch(1.0, 100.0, 0.1), []
    while (rate := found.next_rate()) is not None:
        asked.append(rate)
        given = verdicts.get(rate)
        found.add(rate, given.pop(0) if given else HOLDS if rate <= otherwise else EXCEEDED)
    return found, asked


def test_a_rate_that_was_exceeded_once_by_chance_does_not_end_the_search() -> None:
    found, asked = run_search({16.0: [EXCEEDED, HOLDS]}, otherwise=27.0)
    assert asked.count(16.0) == 2
    assert found.held is not None and found.exceeded is not None
    assert 16 < found.held <= 27 < found.exceeded <= found.held * 1.1
    assert asked[-1] == found.exceeded and asked.count(found.exceeded) == 2, "the upper end is measured once more"


def test_an_upper_end_that_stays_undecided_the_second_time_is_not_called_exceeded() -> None:
    found, asked = run_search({16.0: [EXCEEDED, UNDECIDED]}, otherwise=15.0)
    assert asked.count(16.0) == 2
    assert found.exceeded is not None and found.exceeded > 16.0
    assert found.exceeded in found.confirmed


def test_a_rate_at_which_no_request_succeeded_is_not_exceeded_and_bounds_the_search() -> None:
    found, asked = run_search({8.0: [FAILED], 5.6569: [FAILED]}, otherwise=100.0)
    assert found.exceeded is None
    assert found.held is not None and 4 <= found.held < 5.6569
    assert max(asked) == 8.0 and math.isclose(found.not_held or 0, 5.6569, rel_tol=0.1)
