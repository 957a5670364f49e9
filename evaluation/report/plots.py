"""The report's plots of a static sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from evaluation.report.plot_style import (
    SERIES,
    Point,
    draw_svg,
    label_lines,
    label_points,
    levels_axis,
    scale,
    title_height,
)
from evaluation.report.text import group_by_lengths, lengths_label
from evaluation.speed.benchmark_table import Row

Groups = Mapping[tuple[int, int], Sequence[Row]]


def draw_latency(rows: Sequence[Row], name: str) -> str:
    """Draw latency over batch size, a line a pair of lengths: the mean, with whiskers from p50 to p99.

    Args:
        rows: with figures.
        name: prefix of the SVG's ids, unique in the page.
    """

    def draw(axes: Axes, groups: Groups) -> None:
        for colour, group in zip(cycle(SERIES), groups.values(), strict=False):
            sizes, means = [row.batch_size for row in group], [row.latency_mean_ms or 0.0 for row in group]
            axes.vlines(
                sizes,
                [row.latency_p50_ms or 0.0 for row in group],
                [row.latency_p99_ms or 0.0 for row in group],
                color=colour,
                alpha=0.45,
                linewidth=3,
            )
            axes.plot(sizes, means, color=colour, marker="o", markersize=5, linewidth=2)
        levels_axis(axes, [row.batch_size for row in rows], "Batch size, sequences")
        scale(axes, "y", [row.latency_mean_ms or 0.0 for row in rows])
        title_height(axes, "Latency of a request, ms")

    return _render(rows, name, draw, lambda row: (row.batch_size, row.latency_mean_ms or 0.0))


def draw_throughput(rows: Sequence[Row], name: str) -> str:
    """Draw throughput over mean latency, a line a pair of lengths; the numbers at the points are batch sizes.

    Args:
        rows: with figures.
        name: prefix of the SVG's ids, unique in the page.
    """

    def draw(axes: Axes, groups: Groups) -> None:
        for colour, group in zip(cycle(SERIES), groups.values(), strict=False):
            latencies = [row.latency_mean_ms or 0.0 for row in group]
            throughputs = [row.throughput_tokens_per_s or 0.0 for row in group]
            axes.plot(latencies, throughputs, color=colour, marker="o", markersize=5, linewidth=2)
        scale(axes, "x", [row.latency_mean_ms or 0.0 for row in rows])
        axes.set_ylim(0, 1.12 * max(row.throughput_tokens_per_s or 0.0 for row in rows))
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlabel("Latency of a request, ms (mean)")
        title_height(axes, "Throughput, generated tokens/s")

    return _render(rows, name, draw, _throughput_point, counts_points=True)


def draw_latency_by_size(lines: Mapping[str, Sequence[Point]], name: str) -> str:
    """Draw latency over model size.

    Args:
        lines: points (parameters, mean latency in ms) in order of size, by what the line is called.
        name: prefix of the SVG's ids, unique in the page.
    """

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
        label_lines(figure, axes, [(label, points[-1]) for label, points in lines.items()], centred=True)

    return draw_svg(name, draw)


def _count(value: float) -> str:
    """Show a number of parameters: 13.9M, 1.3B."""
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.0f}"


def _render(
    rows: Sequence[Row],
    name: str,
    draw: Callable[[Axes, Groups], None],
    point: Callable[[Row], Point],
    counts_points: bool = False,
) -> str:
    groups = group_by_lengths(rows)

    def whole(figure: Figure, axes: Axes) -> None:
        draw(axes, groups)
        if counts_points:
            sizes = [(str(row.batch_size), point(row)) for group in groups.values() for row in reversed(group)]
            label_points(figure, axes, sizes)
        ends = [(lengths_label(lengths), point(group[-1])) for lengths, group in groups.items()]
        label_lines(figure, axes, ends, centred=not counts_points)

    return draw_svg(name, whole)


def _throughput_point(row: Row) -> Point:
    return row.latency_mean_ms or 0.0, row.throughput_tokens_per_s or 0.0
