"""The report's plots, as inline SVG whose colours follow the page's light and dark themes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from evaluation.benchmark_table import Row
from evaluation.report_text import group_by_lengths, lengths_label

# Colours that occur nowhere else; each becomes a CSS variable of the page.
_INK, _FAINT, _GRID = "#010a01", "#010a02", "#010a03"
_SERIES = ("#010a11", "#010a12", "#010a13", "#010a14", "#010a15", "#010a16")
_VARIABLES = {
    _INK: "var(--ink)",
    _FAINT: "var(--faint)",
    _GRID: "var(--grid)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(_SERIES, 1)},
}
_LABEL_GAP_PT = 13.0
_LABEL_WIDTH_PT = 85.0
_ROOM_PX = 14.0
_LOG_ABOVE = 8.0
"""Largest over smallest value from which an axis is logarithmic."""

Groups = Mapping[tuple[int, int], Sequence[Row]]
Point = tuple[float, float]


def draw_latency(rows: Sequence[Row], name: str) -> str:
    """Draw latency over batch size, a line a pair of lengths: the mean, with whiskers from p50 to p99.

    Args:
        rows: with figures.
        name: prefix of the SVG's ids, unique in the page.
    """

    def draw(axes: Axes, groups: Groups) -> None:
        for colour, group in zip(cycle(_SERIES), groups.values(), strict=False):
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
        sizes = sorted({row.batch_size for row in rows})
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        _scale(axes, "y", [row.latency_mean_ms or 0.0 for row in rows])
        axes.set_xlabel("Batch size, sequences")
        _title_height(axes, "Latency of a request, ms")

    return _render(rows, name, draw, lambda row: (row.batch_size, row.latency_mean_ms or 0.0))


def draw_throughput(rows: Sequence[Row], name: str) -> str:
    """Draw throughput over mean latency, a line a pair of lengths; the numbers at the points are batch sizes.

    Args:
        rows: with figures.
        name: prefix of the SVG's ids, unique in the page.
    """

    def draw(axes: Axes, groups: Groups) -> None:
        for colour, group in zip(cycle(_SERIES), groups.values(), strict=False):
            latencies = [row.latency_mean_ms or 0.0 for row in group]
            throughputs = [row.throughput_tokens_per_s or 0.0 for row in group]
            axes.plot(latencies, throughputs, color=colour, marker="o", markersize=5, linewidth=2)
        _scale(axes, "x", [row.latency_mean_ms or 0.0 for row in rows])
        axes.set_ylim(0, 1.12 * max(row.throughput_tokens_per_s or 0.0 for row in rows))
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlabel("Latency of a request, ms (mean)")
        _title_height(axes, "Throughput, generated tokens/s")

    return _render(rows, name, draw, _throughput_point, counts_points=True)


def _render(
    rows: Sequence[Row],
    name: str,
    draw: Callable[[Axes, Groups], None],
    point: Callable[[Row], Point],
    counts_points: bool = False,
) -> str:
    groups = group_by_lengths(rows)
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": name,
            "font.size": 11,
            "text.color": _INK,
            "axes.labelcolor": _INK,
            "axes.edgecolor": _GRID,
            "xtick.color": _FAINT,
            "ytick.color": _FAINT,
        }
    ):
        figure = Figure(figsize=(7.2, 4.0))
        axes = figure.add_axes((0.075, 0.13, 0.76, 0.785))
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.grid(True, color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, pad=6)
        draw(axes, groups)
        if counts_points:
            _label_points(figure, axes, groups)
        ends = {lengths: point(group[-1]) for lengths, group in groups.items()}
        _label_lines(figure, axes, ends, centred=not counts_points)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    return _inline(buffer.getvalue(), name)


def _title_height(axes: Axes, text: str) -> None:
    """Name the vertical axis above it, where it reads without turning one's head."""
    axes.set_title(text, loc="left", x=-0.096, pad=11, fontsize=11, color=_INK)


def _scale(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Scale an axis of milliseconds: logarithmic with ticks at 1, 2 and 5 where the values span much."""
    low, high = min(values), max(values)
    set_scale = axes.set_xscale if which == "x" else axes.set_yscale
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    axis = axes.xaxis if which == "x" else axes.yaxis
    if low > 0 and high / low >= _LOG_ABOVE:
        set_scale("log")
        set_limits(low / 1.25, high * 1.35)
        axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
    else:
        set_limits(0, high * 1.15 or 1.0)
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def _label_lines(figure: Figure, axes: Axes, ends: Mapping[tuple[int, int], Point], centred: bool) -> None:
    """Name each line right of its last point; labels that would overlap move up.

    With ``centred``, a line that ends before the others is named above its last point.
    """
    figure.canvas.draw()
    to_points = 72 / figure.dpi
    ordered = sorted(
        (*(axes.transData.transform(end) * to_points), number, lengths)
        for number, (lengths, end) in enumerate(ends.items())
    )
    placed: list[tuple[float, float]] = []
    for x, y, number, lengths in sorted(ordered, key=lambda item: item[1]):
        height = y
        for other_x, other_height in placed:
            if abs(x - other_x) < _LABEL_WIDTH_PT and height < other_height + _LABEL_GAP_PT:
                height = other_height + _LABEL_GAP_PT
        placed.append((x, height))
        is_rightmost = x >= max(item[0] for item in ordered) - 1
        axes.annotate(
            lengths_label(lengths),
            ends[lengths],
            xytext=(9, height - y) if is_rightmost or not centred else (0, 12),
            textcoords="offset points",
            color=_SERIES[number % len(_SERIES)],
            ha="left" if is_rightmost or not centred else "center",
            va="center",
            fontsize=10.5,
            annotation_clip=False,
        )


def _throughput_point(row: Row) -> Point:
    return row.latency_mean_ms or 0.0, row.throughput_tokens_per_s or 0.0


def _label_points(figure: Figure, axes: Axes, groups: Groups) -> None:
    """Write the batch size above and left of each point; a label without room is left out."""
    figure.canvas.draw()
    placed: list[tuple[float, float]] = []
    for group in groups.values():
        for row in reversed(group):
            x, y = axes.transData.transform(_throughput_point(row))
            if any(abs(x - ox) < _ROOM_PX and abs(y - oy) < _ROOM_PX for ox, oy in placed):
                continue
            placed.append((x, y))
            axes.annotate(
                str(row.batch_size),
                _throughput_point(row),
                xytext=(-5, 4),
                textcoords="offset points",
                ha="right",
                color=_FAINT,
                fontsize=9,
            )


def _inline(svg: str, name: str) -> str:
    """Strip what only a file of its own needs, make ids unique in the page, and take the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2", svg, count=1)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg
