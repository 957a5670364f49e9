"""The load generator's figures, by hand arithmetic."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from evaluation.speed.tables.costs import COST_FIGURES, ENERGY_FIGURES
from evaluation.speed.tables.figures import (
    DISTRIBUTIONS,
    FIGURE_COLUMNS,
    FROM_SEND,
    NEWER_FIGURES,
    NEWER_SCALARS,
    SCALARS,
    FigureContext,
    compute_figures,
    compute_newer_figures,
    is_good,
    is_stable,
)
from evaluation.speed.tables.record import RequestRecord, Window, join
from evaluation.speed.tables.server_metrics import SERVER_FIGURES
from evaluation.speed.tables.table import DERIVED_FIGURES

MS = 1_000_000
S = 1_000_000_000


def streamed(
    sent_ms: float, *token_ms: float, queue_ms: float = 0, tokens: tuple[int, ...] | None = None
) -> RequestRecord:
    """A stream that was sent at one time and brought tokens at others, all in ms after the start."""
    times = tuple(round(time * MS) for time in token_ms)
    sent = round(sent_ms * MS)
    return RequestRecord(
        sent - round(queue_ms * MS), sent, times[-1], 10, times, tokens or (1,) * len(times), is_streamed=True
    )


def whole(sent_ms: float, done_ms: float, tokens: int = 4) -> RequestRecord:
    return RequestRecord(
        round(sent_ms * MS), round(sent_ms * MS), round(done_ms * MS), 10, (round(done_ms * MS),), (tokens,)
    )


def failed(sent_ms: float, done_ms: float) -> RequestRecord:
    return RequestRecord(round(sent_ms * MS), round(sent_ms * MS), round(done_ms * MS), 10, error="refused")


# First: sent at 100, tokens at 150, 160, 180 and 220: TTFT 50; gaps 10, 20, 40; TPOT (120 - 50) / 3; E2E 120.
# Second: sent at 200 (due at 197), tokens at 300 and 310: TTFT 100; gap 10; TPOT 10; E2E 110.
TWO = (streamed(100, 150, 160, 180, 220), streamed(200, 300, 310, queue_ms=3))


def test_stream_figures_by_hand() -> None:
    figures = compute_figures([Window(TWO, 0, S)], FigureContext({}))
    assert figures["ttft_mean_ms"] == pytest.approx(75)
    assert figures["ttft_p90_ms"] == pytest.approx(95)  # 50 + 0.9 * 50
    assert figures["itl_mean_ms"] == pytest.approx(20)  # (10 + 20 + 40 + 10) / 4
    assert figures["itl_p50_ms"] == pytest.approx(15)  # between 10 and 20
    assert figures["itl_p99_ms"] == pytest.approx(20 + 0.97 * 20)  # h = 3 * 0.99 = 2.97: between 20 and 40
    assert figures["tpot_mean_ms"] == pytest.approx((70 / 3 + 10) / 2)
    assert figures["e2e_mean_ms"] == pytest.approx(115)
    assert figures["client_queue_mean_ms"] == pytest.approx(1.5)
    assert figures["requests_per_s"] == pytest.approx(2)
    assert figures["output_tokens_per_s"] == pytest.approx(6)
    assert figures["total_tokens_per_s"] == pytest.approx(26)
    # 4 tokens in 120 ms and 2 in 110 ms
    assert figures["output_tokens_per_s_per_user"] == pytest.approx((4 / 0.12 + 2 / 0.11) / 2)


def test_an_open_loop_counts_from_the_due_time_and_keeps_what_it_was_from_the_send() -> None:
    due = tuple(dataclasses.replace(record, is_of_schedule=True) for record in TWO)
    window, context = Window(due, 0, S, backlog=5, arrivals=7), FigureContext({"e2e": 112.0})
    figures = compute_figures([window], context)
    assert figures["ttft_mean_ms"] == pytest.approx((50 + 103) / 2)
    assert figures["e2e_mean_ms"] == pytest.approx((120 + 113) / 2)
    assert figures["goodput_requests_per_s"] == 0, "110 ms after the send are 113 ms after it was due"
    assert figures["output_tokens_per_s_per_user"] == pytest.approx((4 / 0.12 + 2 / 0.113) / 2)
    newer = compute_newer_figures([window, Window((), S, 2 * S, backlog=3, arrivals=2)], context)
    assert newer["ttft_from_send_mean_ms"] == pytest.approx(75)
    assert newer["e2e_from_send_mean_ms"] == pytest.approx(115)
    assert (newer["e2e_min_ms"], newer["e2e_p25_ms"], newer["e2e_max_ms"]) == pytest.approx((113, 114.75, 120))
    assert (newer["offered_requests_per_s"], newer["backlog_at_end"]) == (4.5, 3), "9 requests were due in 2 s"
    assert list(newer) == list(NEWER_FIGURES)
    assert compute_newer_figures([Window(TWO, 0, S)], context)["offered_requests_per_s"] is None, "a closed loop"


def test_tpot_counts_tokens_where_itl_counts_answers() -> None:
    # 4 tokens in two answers, 30 ms apart: one gap of 30, but 30 / 3 a token
    figures = compute_figures([Window((streamed(0, 20, 50, tokens=(1, 3)),), 0, S)], FigureContext({}))
    assert figures["itl_mean_ms"] == pytest.approx(30)
    assert figures["tpot_mean_ms"] == pytest.approx(10)


def test_throughput_per_gpu_divides_by_the_ranks() -> None:
    figures = compute_figures([Window(TWO, 0, S)], FigureContext({}, gpus=4))
    assert figures["output_tokens_per_s_per_gpu"] == pytest.approx(1.5)


def test_without_streaming_ttft_itl_and_tpot_are_missing_not_zero() -> None:
    figures = compute_figures([Window((whole(0, 40), whole(10, 60)), 0, S)], FigureContext({}))
    for name in ("ttft", "itl", "tpot"):
        assert figures[f"{name}_mean_ms"] is None
        assert figures[f"{name}_p99_ms"] is None
    assert figures["e2e_mean_ms"] == pytest.approx(45)


def test_failed_requests_count_in_no_latency_and_in_no_throughput() -> None:
    figures = compute_figures([Window((whole(0, 40), failed(0, 1)), 0, S)], FigureContext({"e2e": 100.0}))
    assert figures["e2e_mean_ms"] == pytest.approx(40)
    assert figures["requests_per_s"] == pytest.approx(1)
    assert figures["goodput_requests_per_s"] == pytest.approx(1)


def test_a_window_of_failures_has_no_throughput_but_a_goodput_of_zero() -> None:
    figures = compute_figures([Window((failed(0, 1),), 0, S)], FigureContext({"e2e": 100.0}))
    assert figures["requests_per_s"] is None
    assert figures["e2e_mean_ms"] is None
    assert figures["goodput_requests_per_s"] == 0


def test_goodput_by_hand() -> None:
    # TTFT 50 and 100, TPOT 23.3 and 10, E2E 120 and 110: limits on one each leave the first, the second, both
    def goodput(**slos: float) -> float | None:
        return compute_figures([Window(TWO, 0, 2 * S)], FigureContext(slos))["goodput_requests_per_s"]

    assert goodput() is None
    assert goodput(ttft=60) == pytest.approx(0.5)
    assert goodput(tpot=12) == pytest.approx(0.5)
    assert goodput(ttft=60, tpot=12) == 0
    assert goodput(ttft=100, tpot=24, e2e=120) == pytest.approx(1)


def test_an_slo_on_what_is_not_observed_is_not_kept() -> None:
    assert not is_good(whole(0, 40), {"ttft": 1000.0})
    assert is_good(streamed(0, 10), {"tpot": 5.0}), "a single token has no time per token to break"
    assert not is_good(failed(0, 1), {})


def test_repeats_are_stable_when_both_intervals_are_narrow() -> None:
    def repeat(latency_ms: float, duration_s: float = 1.0) -> Window:
        return Window((whole(0, latency_ms),), 0, round(duration_s * S))

    steady = [repeat(100), repeat(101), repeat(100), repeat(101)]
    assert is_stable(steady, FigureContext({}), 0.05)
    assert not is_stable([repeat(100), repeat(150), repeat(100)], FigureContext({}), 0.05)
    assert not is_stable([repeat(100, 1.0), repeat(100, 1.5), repeat(100, 1.0)], FigureContext({}), 0.05)
    assert not is_stable(steady[:1], FigureContext({}), 0.05)


def test_joined_windows_keep_their_time() -> None:
    joined = join((Window(TWO[:1], 5, 7), Window(TWO[1:], 7, 11)))
    assert joined == Window(TWO, 5, 11)


def test_every_figure_is_declared_with_a_unit_and_a_formula() -> None:
    units = ("_ms", "_per_s", "_per_user", "_per_gpu")
    assert all(name.endswith(units) for name in FIGURE_COLUMNS)
    assert all(item.formula for item in (*DISTRIBUTIONS, *SCALARS))
    assert list(compute_figures([], FigureContext({}))) == list(FIGURE_COLUMNS)
    assert set(compute_figures([], FigureContext({})).values()) == {None}


def test_the_guide_has_every_column_with_its_formula() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "latency.md").read_text()
    formulas = {f"{item.name}_{{mean,p50,p90,p95,p99}}_ms": item.formula for item in (*DISTRIBUTIONS, *FROM_SEND)}
    formulas |= {item.name: item.formula for item in (*SCALARS, *NEWER_SCALARS)}
    for name, formula in (formulas | SERVER_FIGURES | COST_FIGURES | ENERGY_FIGURES | DERIVED_FIGURES).items():
        assert f"| `{name}` | {formula} |" in guide
