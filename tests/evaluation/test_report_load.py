"""The report of a load: tables, plots, remarks, and the page in a real browser."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from support.measurements.results_maker import load_row, static_row, write_results

from evaluation.report import plot_style, plots
from evaluation.report import write as report
from evaluation.report.plots import distribution_steps, draw_distribution, read_samples
from evaluation.speed.exports import write_point
from evaluation.speed.tables.raw_records import PointRecords
from evaluation.speed.tables.record import RequestRecord, Window
from evaluation.speed.tables.table import Row
from evaluation.speed.under_load import Measured

FIGURES = {
    "requests_per_s": 10.0,
    "output_tokens_per_s": 200.0,
    "ci95_output_tokens_per_s": 4.0,
    "output_tokens_per_s_per_user": 25.0,
    "output_tokens_per_s_per_gpu": 200.0,
    "e2e_mean_ms": 410.0,
    "e2e_p50_ms": 400.0,
    "e2e_p90_ms": 450.0,
    "e2e_p95_ms": 470.0,
    "e2e_p99_ms": 490.0,
    "server_queue_mean_ms": 1.25,
    "server_memory_peak_bytes": 6e8,
    "client_cpu_cores": 0.1,
}
STREAMED = {"ttft_mean_ms": 31.0, "ttft_p50_ms": 30.0, "ttft_p99_ms": 60.0, "itl_mean_ms": 9.0, "is_streaming": True}


def points(**changes: Any) -> list[Row]:
    return [load_row(size, **{**FIGURES, "output_tokens_per_s": 100.0 * size, **changes}) for size in (1, 2, 4)]


def write_report(results: Path) -> tuple[str, str]:
    argv = [f"--results={results}", f"--output={results / 'report.partial'}", "--title=demo"]
    report.main([*argv, f"--stages={results / 'logs' / 'stages.json'}"])
    return tuple((results / "report.partial" / name).read_text() for name in ("report.md", "report.html"))  # type: ignore


def profile(results: Path, row: Row) -> None:
    """Two requests of three tokens: TTFT 5 and 7 ms, gaps of 1, 2, 3 and 4 ms."""
    requests = [
        {"timestamp": 1_000_000, "response_timestamps": [6_000_000, 7_000_000, 9_000_000]},
        {"timestamp": 2_000_000, "response_timestamps": [9_000_000, 12_000_000, 16_000_000]},
    ]
    directory = results / "benchmark" / "load" / row.directory
    directory.mkdir()
    (directory / "profile_export.json").write_text(json.dumps({"experiments": [{"requests": requests}]}))


def test_what_was_measured_under_load_is_reported_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*points(**STREAMED), load_row(8, state="failed", error="out of <memory>", figures={})]
    results = write_results(tmp_path / "run", load=rows, static=[static_row(4, [10.0, 12.0])])
    for row in rows[:3]:
        profile(results, row)
    markdown, html = write_report(results)
    printed = capsys.readouterr().out
    for text in ("concurrency 4", "400.0 ±4.00", "490.0"):
        assert text in markdown
        assert text in html
        assert text in printed
    for text in ("Time to first token", "1.25", "600.0 MB", "out of"):
        assert text in markdown
        assert text in html
    assert "out of &lt;memory&gt;" in html
    assert "up to 400.0 tokens/s (concurrency 4, 60/20 tokens" in html
    # static: 2; load: throughput, latency, TTFT, ITL; Pareto
    assert html.count("<svg") == 7
    assert "Recommendation" in html
    assert re.findall(r"url\((?!#)", html) == []
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids))


def test_durations_are_read_back_by_hand(tmp_path: Path) -> None:
    (row,) = rows = [load_row(2)]
    results = write_results(tmp_path, load=rows)
    profile(results, row)
    directory = results / "benchmark" / "load"
    assert read_samples(directory, rows, "ttft") == [("concurrency 2", [5.0, 7.0])]
    assert read_samples(directory, rows, "itl") == [("concurrency 2", [1.0, 2.0, 3.0, 4.0])]
    assert read_samples(directory, rows, "e2e") == [("concurrency 2", [8.0, 14.0])]
    assert read_samples(directory, [load_row(9)], "e2e") == []


def test_distributions_are_those_of_the_raw_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is the CSV itself; a profile that says something else changes nothing."""
    row = load_row(2, **{**FIGURES, **STREAMED})
    results = write_results(tmp_path / "run", load=[row])
    directory = results / "benchmark" / "load" / row.directory
    write_point(directory, Measured(row, made_up_point()), {})
    with gzip.open(directory / "requests.csv.gz", "rt", newline="") as stream:
        lines = [line for line in csv.DictReader(stream) if line["repeat"] != "0" and line["status"] == "ok"]
    times = [list(map(int, line["token_ns"].split())) for line in lines]
    sent = [int(line["sent_ns"]) for line in lines]
    expected = {
        "Time to first token": [(each[0] - start) / 1e6 for each, start in zip(times, sent, strict=True)],
        "Inter-token latency": [(b - a) / 1e6 for each in times for a, b in itertools.pairwise(each)],
    }
    assert len(lines) == 900
    profile = directory / "profile_export.json"
    profile.write_text(profile.read_text().replace('"timestamp": ', '"timestamp": 1'))
    drawn: dict[str, list[float]] = {}

    def draw(samples: list[tuple[str, list[float]]], name: str, title: str) -> str:
        ((_, drawn[title]),) = samples
        return draw_distribution(samples, name, title)

    monkeypatch.setattr("evaluation.report.plots.draw_distribution", draw)
    write_report(results)
    assert {title: sorted(values) for title, values in drawn.items()} == {
        title: sorted(values) for title, values in expected.items()
    }
    for values in expected.values():
        for value, percent in distribution_steps(values):
            below, up_to = sum(each < value for each in values), sum(each <= value for each in values)
            assert 100 * below / len(values) < percent <= 100 * up_to / len(values)
        assert distribution_steps(values)[-1] == (max(values), 100.0)


def made_up_point() -> PointRecords:
    """A warm-up, 900 requests of 5 tokens at times of their own, one that failed and one whose client hung up."""
    random = np.random.default_rng(3)

    def request(number: int, **changes: Any) -> RequestRecord:
        sent = 10_000_000 * number
        times = tuple(int(time) for time in sent + np.cumsum(random.integers(1, 9_000_000, 5)))
        record = RequestRecord(sent, sent, times[-1], 3, times, (1,) * 5, is_streamed=True)
        return replace(record, **changes)

    bad = [request(901, error="no room", chunk_ns=(), chunk_tokens=()), request(902, is_cancelled=True)]
    window = Window((*(request(number) for number in range(1, 901)), *bad), 10_000_000, 9_100_000_000)
    return PointRecords((window,), (request(0),))


@pytest.mark.parametrize("slowest_ms", [200.0, 4000.0])  # a linear and a logarithmic axis
def test_no_whisker_is_cut_off(monkeypatch: pytest.MonkeyPatch, slowest_ms: float) -> None:
    drawn: list[Axes] = []

    def draw_svg(name: str, draw: Callable[[Figure, Axes], None]) -> str:
        drawn.append(Figure().add_axes((0, 0, 1, 1)))
        draw(Figure(), drawn[0])
        return ""

    monkeypatch.setattr(plots, "draw_svg", draw_svg)
    rows = [static_row(1, [90.0] * 3), static_row(8, [60.0, 60.0, slowest_ms])]
    plots.draw_latency(rows, "name")
    low, high = drawn[0].get_ylim()
    p99_ms, mean_ms = rows[1].figures["e2e_p99_ms"], rows[1].figures["e2e_mean_ms"]
    assert p99_ms is not None and mean_ms is not None
    assert low < 60 and high > p99_ms > 1.5 * mean_ms
    assert drawn[0].get_yscale() == ("linear" if slowest_ms < 1000 else "log")


def keep_drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Figure, Axes]]:
    """Where plots that are drawn from now on are kept."""
    drawn: list[tuple[Figure, Axes]] = []
    original = plot_style.draw_svg

    def draw_svg(name: str, draw: Callable[[Figure, Axes], None]) -> str:
        def draw_and_keep(figure: Figure, axes: Axes) -> None:
            draw(figure, axes)
            drawn.append((figure, axes))

        return original(name, draw_and_keep)

    monkeypatch.setattr(plots, "draw_svg", draw_svg)
    return drawn


@pytest.mark.parametrize("slowest_ms", [60.0, 9_000.0, 14_000.0, 340_000.0])
def test_no_label_of_a_height_is_cut_off(monkeypatch: pytest.MonkeyPatch, slowest_ms: float) -> None:
    drawn = keep_drawn(monkeypatch)
    plots.draw_latency([static_row(1, [20.0] * 3), static_row(8, [slowest_ms] * 3)], "name")
    ((figure, axes),) = drawn
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    labels = [each for each in axes.get_yticklabels() if low <= each.get_position()[1] <= high and each.get_text()]
    assert len(labels) > 1 and min(each.get_window_extent().x0 for each in labels) >= 0
    assert axes.get_position().x1 == pytest.approx(0.835)  # there is the room for the lines' names


@pytest.mark.parametrize("count", [1, 3])
def test_texts_of_throughput_over_latency_do_not_overlap(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    drawn, rows = keep_drawn(monkeypatch), list[Row]()
    workloads = [("60/20", 30.0, 5.0), ("225/20", 32.0, 5.3), ("200/200", 300.0, 50.0)][:count]
    for workload, first_ms, each_ms in workloads:
        for size in (1, 2, 4, 8, 16, 32):
            row = replace(static_row(size, [first_ms + each_ms * size] * 3), workload=workload)
            rows.append(replace(row, figures={**row.figures, "output_tokens_per_s": 10.0 * size}))
    plots.draw_throughput_over_latency(rows, "name")
    ((figure, axes),) = drawn
    figure.draw_without_rendering()
    legend = axes.get_legend()
    names = [each.get_text() for each in legend.get_texts()] if legend else [axes.texts[0].get_text()]
    assert names == [f"{workload.replace('/', ' in, ')} out" for workload, *_ in workloads]
    places = [each.get_window_extent() for each in axes.texts]
    assert len(places) > 4
    assert not any(one.overlaps(other) for number, one in enumerate(places) for other in places[:number])


def test_no_line_crosses_a_batch_size_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, rows = keep_drawn(monkeypatch), list[Row]()
    for workload, tokens_per_s in (("60/20", [20, 60, 100, 140]), ("225/20", [10, 50, 90, 130])):
        for size, rate in zip((1, 2, 4, 8), tokens_per_s, strict=True):
            row = replace(static_row(size, [10.0 * size] * 3), workload=workload)
            rows.append(replace(row, figures={**row.figures, "output_tokens_per_s": float(rate)}))
    plots.draw_throughput_over_latency(rows, "name")
    ((figure, axes),) = drawn
    figure.draw_without_rendering()
    lines = [line.get_path().transformed(axes.transData) for line in axes.get_lines()]
    places = [each.get_window_extent() for each in axes.texts]
    assert len(places) == 8
    assert not any(line.intersects_bbox(place, filled=False) for line in lines for place in places)


def test_more_lines_than_colours_keep_the_lightest_and_the_heaviest(tmp_path: Path) -> None:
    rows = [load_row(size) for size in range(1, 12)]
    results = write_results(tmp_path, load=rows)
    for row in rows:
        profile(results, row)
    shown = [label for label, _ in read_samples(results / "benchmark" / "load", rows, "e2e")]
    assert (shown[0], shown[-1], len(shown)) == ("concurrency 1", "concurrency 11", 6)


def test_columns_without_a_figure_are_left_out(tmp_path: Path) -> None:
    markdown, _ = write_report(write_results(tmp_path / "run", load=points()))
    assert "Goodput" not in markdown
    assert "Time to first token" not in markdown
    assert "GPU memory" not in markdown


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"is_stable": False}, "did not agree closely at concurrency 1, concurrency 2, concurrency 4"),
        ({"failed_requests": 2, "error": "timed out"}, "6 requests of benchmark load failed: timed out"),
        ({"is_random_weights": True}, "on random weights"),
        ({"client_cpu_cores": 0.95}, "near one core's limit"),
        ({"state": "failed", "error": "gone"}, "3 of 3 points of benchmark load failed"),
    ],
)
def test_what_makes_figures_less_than_they_seem_is_said_first(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    markdown, html = write_report(write_results(tmp_path / "run", load=points(**changes)))
    assert sentence in markdown
    assert sentence in unescape(html)


def test_the_online_recommendation_goes_by_the_slos_of_the_run(tmp_path: Path) -> None:
    results = write_results(
        tmp_path / "run", load=[load_row(1, **FIGURES), load_row(2, **{**FIGURES, "e2e_p95_ms": 700.0})]
    )
    summary = {"points": [{"result": None}, {"result": {"goodput_slos_ms": {"e2e": 500.0}}}]}
    (results / "benchmark" / "load" / "summary.json").write_text(json.dumps(summary))
    _, html = write_report(results)
    online = html.partition("Online, 60/20 tokens: most tokens per second with e2e p95 within 500 ms")[2].partition(
        "<h2>"
    )[0]
    assert "concurrency 1" in online
    assert "concurrency 2" not in online


class Links(HTMLParser):
    """Addresses that a page asks for."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            value or "" for name, value in attrs if name in ("src", "href") and not (value or "").startswith("#")
        ]


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    _, html = write_report(write_results(tmp_path / "run", load=points()))
    assert Links(html).found == []
