"""Plots of a sweep's engines: throughput over what a user gets, latencies over the load, and distributions.

There is a line for each run; that of one that is not comparable with the other engines is dashed, and named so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.report.engine_tables import column_names, has_several_engines, rows_by_load, speed_figure
from evaluation.report.page import Plot
from evaluation.report.plot_style import SERIES, Point, draw_svg, legend_above, levels_axis, scale
from evaluation.report.plots import draw_distribution, read_samples, scale_from_zero, title_of_levels
from evaluation.report.sweep_points import Point as Run
from evaluation.speed.tables.figures import BY_NAME
from evaluation.speed.tables.table import CLOSED, OPEN, STATIC, Row
from evaluation.tasks.metric import HOLDS

_PER_GPU = "output_tokens_per_s_per_gpu"
_WAYS = {
    "output_tokens_per_s_per_user": ("Generated tokens/s for one user", "Up and right is better.", 1),
    "e2e_p50_ms": ("Latency of a request, ms (p50)", "Up and left is better.", -1),
    "e2e_p99_ms": ("Latency of a request, ms (p99)", "Up and left is better.", -1),
}
"""Horizontal axes of the trade-offs: title, what is better, and 1 where more is better."""
_OVER_LOAD = ("ttft", "itl")
_DISTRIBUTIONS = ("ttft", "itl", "e2e")
_FRONT = "A line joins the loads of a run that no other load of it beats in both; the others are faint points."
_DASHED, _SOLID = (0, (4, 2)), "solid"


@dataclass(frozen=True)
class Line:
    """A line of one run.

    Attributes:
        name: of the run; it says where the run is not comparable.
        is_comparable: whether it is drawn solid.
        points: from the lightest load to the heaviest.
        tails: the same loads' 99th percentiles; empty where only one value belongs to a load.
        loose: further points, which the line does not join.
    """

    name: str
    is_comparable: bool
    points: Sequence[Point]
    tails: Sequence[Point] = ()
    loose: Sequence[Point] = ()


def engine_plots(runs: Sequence[Run], name: str) -> list[Plot]:
    """Draw what is there for each pair of lengths, nothing for one engine; the plots' ids begin with ``name``."""
    if not has_several_engines(runs):
        return []
    known = [run for run in runs if run.benchmarks]
    workloads = dict.fromkeys(row.workload for run in known for row in _rows(run))
    plots = []
    for number, workload in enumerate(workloads):
        prefix = f"{name}-{number}"
        plots += [*_trade_offs(known, workload, prefix), *_over_loads(known, workload, prefix)]
        plots += _distributions(known, workload, prefix)
    return plots


def _trade_offs(runs: Sequence[Run], workload: str, name: str) -> Iterable[Plot]:
    for figure, (title, better, sign) in _WAYS.items():
        lines = [front_of(line, sign) for line in _lines(runs, workload, (OPEN, CLOSED, STATIC), figure, _PER_GPU)]
        if any(len(line.points) > 1 for line in lines):
            svg = draw_lines(lines, f"{name}-{figure}", title, "Generated tokens/s for one GPU (or the CPU)")
            yield Plot(svg, f"{workload} tokens: what a GPU gives over what a user gets. {better} {_FRONT}")


def _over_loads(runs: Sequence[Run], workload: str, name: str) -> Iterable[Plot]:
    for mode in (OPEN, CLOSED):
        for kind in _OVER_LOAD:
            lines = _lines(runs, workload, (mode,), "level", f"{kind}_p50_ms", f"{kind}_p99_ms")
            if any(len(line.points) > 1 for line in lines):
                svg = draw_over_load(
                    lines, f"{name}-{mode}-{kind}", title_of_levels(mode), f"{BY_NAME[kind].title}, ms"
                )
                caption = "Thick lines are medians, thin ones are 99th percentiles."
                yield Plot(svg, f"{BY_NAME[kind].title} at {workload} tokens over the load. {caption}")


def _distributions(runs: Sequence[Run], workload: str, name: str) -> Iterable[Plot]:
    """Draw the distributions at the last load that as many runs as any other have measured."""
    shared = [
        (load, rows)
        for (lengths, load), rows in rows_by_load(runs).items()
        if lengths == workload and sum(row is not None for row in rows) > 1
    ]
    most = max((sum(row is not None for row in rows) for _, rows in shared), default=0)
    for load, rows in [each for each in shared if sum(row is not None for row in each[1]) == most][-1:]:
        named = list(zip(runs, column_names(runs), rows, strict=True))
        for kind in _DISTRIBUTIONS:
            samples = [
                (label, values)
                for run, label, row in named
                if row is not None
                for benchmark in run.benchmarks
                if row in benchmark.rows
                for _, values in read_samples(benchmark.directory, [row], kind)
            ]
            if len(samples) > 1:
                title = BY_NAME[kind].title
                svg = draw_distribution(samples, f"{name}-{kind}-share", title)
                yield Plot(svg, f"{title} at {workload} tokens, {load}, every request. Further left is better.")


def front_of(line: Line, sign: int) -> Line:
    """Keep the points of a run that no other point of it beats in both figures; the others become loose points.

    Args:
        line: every load of a run.
        sign: 1 where more of the horizontal figure is better, -1 where less is.
    """
    kept: list[Point] = []
    for x, y in sorted(line.points, key=lambda point: (-sign * point[0], -point[1])):
        if not kept or y > kept[-1][1]:
            kept.append((x, y))
    return replace(line, points=kept, loose=[point for point in line.points if point not in kept])


def draw_lines(lines: Sequence[Line], name: str, title: str, height: str) -> str:
    """Draw one figure over another, a line a run; both axes begin at 0 where the values do not span much."""

    def draw(figure: Figure, axes: Axes) -> None:
        _draw(axes, lines)
        scale(axes, "x", [x for line in lines for x, _ in (*line.points, *line.loose)])
        scale_from_zero(axes, [y for line in lines for _, y in line.points])
        axes.set_xlabel(title)
        legend_above(axes, height, [line.name for line in lines])

    return draw_svg(name, draw)


def draw_over_load(lines: Sequence[Line], name: str, title: str, height: str) -> str:
    """Draw medians over the load, a line a run, with their 99th percentiles as a thin one."""

    def draw(figure: Figure, axes: Axes) -> None:
        _draw(axes, lines)
        levels_axis(axes, [x for line in lines for x, _ in line.points], title)
        scale(axes, "y", [y for line in lines for _, y in (*line.points, *line.tails)])
        legend_above(axes, height, [line.name for line in lines])

    return draw_svg(name, draw)


def _draw(axes: Axes, lines: Sequence[Line]) -> None:
    for colour, line in zip(cycle(SERIES), lines, strict=False):
        look: dict[str, Any] = {"color": colour, "linestyle": _SOLID if line.is_comparable else _DASHED}
        axes.plot(*zip(*line.points, strict=True), marker="o", markersize=5, linewidth=2, label=line.name, **look)
        if line.tails:
            axes.plot(*zip(*line.tails, strict=True), marker="o", markersize=3, linewidth=1, alpha=0.7, **look)
        if line.loose:
            axes.plot(
                *zip(*line.loose, strict=True), marker="o", markersize=4, linestyle="none", color=colour, alpha=0.4
            )


def _rows(run: Run) -> Iterable[Row]:
    return (row for benchmark in run.benchmarks for row in benchmark.measured)


def _lines(
    runs: Sequence[Run], workload: str, modes: Sequence[str], along: str, height: str, tail: str = ""
) -> list[Line]:
    """Make the lines of the runs that have both figures at some load of a mode; ``along`` may be the level itself."""
    found = []
    for run, label in zip(runs, column_names(runs), strict=True):
        rows = sorted((r for r in _rows(run) if r.workload == workload and r.mode in modes), key=lambda r: r.level)
        line = Line(label, run.parity == HOLDS, tuple(_points(rows, along, height)))
        if line.points:
            found.append(replace(line, tails=tuple(_points(rows, along, tail)) if tail else ()))
    return found


def _points(rows: Sequence[Row], along: str, height: str) -> Iterable[Point]:
    figures: Mapping[str, str] = {"x": along, "y": height}
    for row in rows:
        values = [row.level if name == "level" else speed_figure(row, name) for name in figures.values()]
        if values[0] is not None and values[1] is not None:
            yield values[0], values[1]
