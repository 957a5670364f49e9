"""The report's plots: latency and throughput of benchmarks, distributions, the Pareto front, and models by size.

Rows are those with figures, and of one mode. ``name`` is the prefix of a plot's ids, unique in the page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from evaluation.report.plot_style import (
    FAINT,
    SERIES,
    Point,
    draw_svg,
    label_lines,
    label_points,
    legend_above,
    levels_axis,
    scale,
    title_height,
)
from evaluation.report.ranking import DeploymentCandidate, pareto_front
from evaluation.report.tables import group_by_workload, lengths_label
from evaluation.speed.tables.figures import BY_NAME
from evaluation.speed.tables.formulas import NANOSECONDS_PER_MS, percentile
from evaluation.speed.tables.raw_records import read_records
from evaluation.speed.tables.table import CLOSED, OPEN, PROFILE, STATIC, Row
from handover.errors import ArtefactError

_LEVELS = {STATIC: "Batch size, sequences", CLOSED: "Requests in flight", OPEN: "Requests per second"}
_MOST_LINES = len(SERIES)
_LONG_NAME = 12  # characters
_MOST_STEPS = 400
"""Points of a distribution's line: more would only make the page heavy."""
_TAIL_PERCENT = 99.5
"""Where a distribution's axis ends: a single outlier must not flatten the rest."""


_Span = Callable[[Row], tuple[float, float] | None]


def draw_throughput(rows: Sequence[Row], name: str) -> str:
    """Draw tokens/s of a load over its level, with 95% intervals, a line a pair of lengths."""
    return _over_level(rows, name, "Throughput, generated tokens/s", "output_tokens_per_s", _interval, from_zero=True)


def draw_latency(rows: Sequence[Row], name: str) -> str:
    """Draw end-to-end latency over batch size (the mean) or load (the median); bars reach from p50 to p99."""
    figure = "e2e_mean_ms" if rows[0].mode == STATIC else "e2e_p50_ms"
    return _over_level(rows, name, "Latency of a request, ms", figure, _to_p99, from_zero=False)


def draw_throughput_over_latency(rows: Sequence[Row], name: str) -> str:
    """Draw throughput of a static sweep over mean latency, a line a pair of lengths; the numbers are batch sizes."""

    def point(row: Row) -> Point:
        return row.figures.get("e2e_mean_ms") or 0.0, row.figures.get("output_tokens_per_s") or 0.0

    def draw(figure: Figure, axes: Axes) -> None:
        groups = group_by_workload(rows).values()
        for colour, group in zip(cycle(SERIES), groups, strict=False):
            axes.plot(*zip(*map(point, group), strict=True), color=colour, marker="o", markersize=5, linewidth=2)
        scale(axes, "x", [point(row)[0] for row in rows])
        scale_from_zero(axes, [point(row)[1] for row in rows])
        axes.set_xlabel("Latency of a request, ms (mean)")
        title, names = "Throughput, generated tokens/s", [lengths_label(group[-1]) for group in groups]
        if len(names) == 1:
            title_height(axes, title)
            label_lines(figure, axes, [(names[0], point(rows[-1]))])
        else:
            legend_above(axes, title, names)  # a name at the end of a line would lie on another line
        label_points(figure, axes, [(str(row.batch_size), point(row)) for group in groups for row in reversed(group)])

    return draw_svg(name, draw)


def draw_distribution(samples: Sequence[tuple[str, Sequence[float]]], name: str, title: str) -> str:
    """Draw the share of values up to each value, a line a load, at most as many as there are colours; values in ms."""

    def draw(figure: Figure, axes: Axes) -> None:
        for colour, (_, values) in zip(cycle(SERIES), samples, strict=False):
            steps = distribution_steps(values)
            axes.step(*zip((steps[0][0], 0.0), *steps, strict=True), where="post", color=colour, linewidth=2)
        scale(axes, "x", [value for _, values in samples for value in _without_tail(values)])
        axes.set_ylim(0, 102)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
        axes.set_xlabel(f"{title}, ms")
        legend_above(axes, "Share of values up to there", [text for text, _ in samples])

    return draw_svg(name, draw)


def distribution_steps(values: Sequence[float]) -> list[Point]:
    """Return values in ascending order with the percentage of all up to each; of very many, some and the last."""
    ordered, last = sorted(values), len(values) - 1
    picked = [*range(0, last, max(1, len(values) // _MOST_STEPS)), last]
    return [(ordered[number], 100 * (number + 1) / len(ordered)) for number in picked]


def draw_pareto(candidates: Sequence[DeploymentCandidate], name: str) -> str:
    """Draw tokens/s/GPU over tokens/s/user; the line joins what nothing beats in both, the others are faint.

    Points have names if they are on the line, or where there is none.
    """

    def draw(figure: Figure, axes: Axes) -> None:
        front = pareto_front(candidates)
        per_gpu = [c.tokens_per_s_per_gpu or 0.0 for c in candidates]
        beaten = [candidate for candidate in candidates if candidate not in front]
        axes.plot(*_axes_of(beaten), color=FAINT, marker="o", markersize=4, linestyle="none")
        axes.plot(*_axes_of(front), color=SERIES[0], marker="o", markersize=6, linewidth=2)
        axes.set_ylim(0, 1.12 * max(per_gpu))
        axes.set_xlim(0, 1.2 * max(candidate.tokens_per_s_per_user for candidate in candidates))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlabel("Generated tokens/s for one user")
        title_height(axes, "Generated tokens/s for one GPU (or the CPU)")
        labels = [(c.load, (c.tokens_per_s_per_user, c.tokens_per_s_per_gpu or 0.0)) for c in front or candidates]
        label_points(figure, axes, labels, is_falling=True)

    return draw_svg(name, draw)


def read_samples(directory: Path, rows: Sequence[Row], kind: str) -> list[tuple[str, list[float]]]:
    """Read the ttft, itl or e2e of every request of a load's points, in ms; a damaged point is left out."""
    samples = []
    for row in rows:
        try:
            values = _values_ms(directory / row.directory, kind)
        except (ArtefactError, OSError, ValueError, KeyError, IndexError, TypeError):
            continue
        if values:
            samples.append((row.label, values))
    # Where there are more lines than colours, evenly spaced ones are shown, the lightest and heaviest load included.
    if len(samples) > _MOST_LINES:
        last = len(samples) - 1
        samples = [samples[round(number * last / (_MOST_LINES - 1))] for number in range(_MOST_LINES)]
    return samples


def _values_ms(directory: Path, kind: str) -> list[float]:
    """Compute a distribution from the raw records, or from ``profile_export.json`` where they are not complete."""
    if (directory / PROFILE).is_file():  # a static point has none
        point = read_records(directory)
        if point is not None and not point.requests_left_out and not (kind == "itl" and point.token_times_left_out):
            return BY_NAME[kind].values_ms(point.records)
    content = json.loads((directory / PROFILE).read_text())
    experiment = content["experiments"][0]
    begin = "scheduled" if experiment.get("experiment", {}).get("mode") == "request_rate" else "timestamp"
    requests = experiment["requests"]
    return [value / NANOSECONDS_PER_MS for request in requests for value in _durations(request, begin, kind)]


def _durations(request: dict[str, object], begin: str, kind: str) -> list[int]:
    began, times = request.get(begin, request["timestamp"]), request["response_timestamps"]
    assert isinstance(began, int) and isinstance(times, list)
    if kind == "itl":
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return [(times[0] if kind == "ttft" else times[-1]) - began]


def draw_latency_by_size(lines: Mapping[str, Sequence[Point]], name: str) -> str:
    """Draw latency over model size: points (parameters, mean latency in ms) in order of size, by the line's name."""

    def draw(figure: Figure, axes: Axes) -> None:
        for colour, points in zip(cycle(SERIES), lines.values(), strict=False):
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=5, linewidth=2)
        sizes = sorted({size for points in lines.values() for size, _ in points})
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _count(value)))
        axes.set_xlabel("Parameters")
        scale(axes, "y", [latency for points in lines.values() for _, latency in points])
        title_height(axes, "Latency of a request, ms")
        label_lines(figure, axes, [(label, points[-1]) for label, points in lines.items()])

    return draw_svg(name, draw)


def _interval(row: Row) -> tuple[float, float] | None:
    value, noise = row.figures.get("output_tokens_per_s"), row.figures.get("ci95_output_tokens_per_s")
    return None if value is None or noise is None else (max(0.0, value - noise), min(value + noise, 2 * value))


def _to_p99(row: Row) -> tuple[float, float] | None:
    low, high = row.figures.get("e2e_p50_ms"), row.figures.get("e2e_p99_ms")
    return None if low is None or high is None else (low, high)


def _over_level(rows: Sequence[Row], name: str, title: str, column: str, span: _Span, from_zero: bool) -> str:
    """Draw one figure over batch size or load, with a bar at each point."""

    def draw(figure: Figure, axes: Axes) -> None:
        ends, shown = [], list[float]()
        for colour, points in zip(cycle(SERIES), group_by_workload(rows).values(), strict=False):
            found = [(row.level, row.figures.get(column)) for row in sorted(points, key=lambda r: r.level)]
            values = [(level, value) for level, value in found if value is not None]
            if not values:
                continue
            axes.plot(*zip(*values, strict=True), color=colour, marker="o", markersize=5, linewidth=2)
            for row in points:
                bar = span(row)
                if bar is not None:
                    axes.vlines([row.level], [bar[0]], [bar[1]], color=colour, alpha=0.45, linewidth=3)
                    shown += bar
            shown += [value for _, value in values]
            ends.append((_label(points[-1]), values[-1]))
        levels_axis(axes, [row.level for row in rows], title_of_levels(rows[0].mode))
        if from_zero:
            scale_from_zero(axes, shown)
        else:
            scale(axes, "y", shown)
        title_height(axes, title)
        label_lines(figure, axes, ends)

    return draw_svg(name, draw)


def title_of_levels(mode: str) -> str:
    """Name the axis of the loads of a mode."""
    return _LEVELS[mode]


def scale_from_zero(axes: Axes, values: Sequence[float]) -> None:
    """Scale the vertical axis linearly from 0."""
    axes.set_ylim(0, 1.12 * max(values, default=1.0))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _label(row: Row) -> str:
    """Name of a line, two lines long where it would leave the page: that of distributions of lengths."""
    if row.mode == STATIC:
        return lengths_label(row)
    return f"{row.workload} tokens" if len(row.workload) < _LONG_NAME else row.workload.replace("/", "/\n")


def _without_tail(values: Sequence[float]) -> list[float]:
    end = percentile(values, _TAIL_PERCENT)
    return [value for value in values if end is None or value <= end]


def _axes_of(candidates: Sequence[DeploymentCandidate]) -> tuple[list[float], list[float]]:
    return [c.tokens_per_s_per_user for c in candidates], [c.tokens_per_s_per_gpu or 0.0 for c in candidates]


def _count(value: float) -> str:
    """Show a number of parameters: 13.9M, 1.3B."""
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.0f}"
