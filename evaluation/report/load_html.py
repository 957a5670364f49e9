"""The report's sections about a load, as HTML."""

from __future__ import annotations

from collections.abc import Callable

from markupsafe import Markup

from evaluation.report.load_findings import Load
from evaluation.report.load_plots import (
    draw_distribution,
    draw_load_latency,
    draw_load_throughput,
    draw_pareto,
    read_samples,
)
from evaluation.report.load_text import Table, group_by_workload, load_tables
from evaluation.report.page import figure
from evaluation.report.recommendation import Candidate
from evaluation.speed.load_table import CLOSED, OPEN, LoadRow

_DISTRIBUTIONS = (
    ("ttft", "Time to first token"),
    ("itl", "Inter-token latency"),
    ("e2e", "End-to-end latency"),
)


def load_parts(load: Load, name: str, table: Callable[[Table], Markup]) -> list[Markup]:
    """Render plots and tables of a load.

    Args:
        load: the sweep.
        name: prefix of ids, unique in the page.
        table: renders a table.
    """
    parts = []
    for mode, what in ((CLOSED, "requests in flight"), (OPEN, "requests per second")):
        rows = [row for row in load.measured if row.mode == mode]
        if len({row.level for row in rows}) > 1:
            throughput = draw_load_throughput(rows, f"{name}-{mode}-throughput")
            parts.append(
                figure(throughput, f"Throughput over {what}. Bars are 95% intervals over the repeats, at most 100%.")
            )
            latency = draw_load_latency(rows, f"{name}-{mode}-latency")
            parts.append(figure(latency, f"Latency over {what}. Points are medians, bars reach to p99."))
    for number, (workload, points) in enumerate(group_by_workload(load.measured).items()):
        parts += _distributions(load, f"{name}-{number}", workload, points)
    return parts + [table(content) for content in load_tables(load.rows)]


def pareto_parts(candidates: list[Candidate], name: str) -> list[Markup]:
    """Render the Pareto front of each workload that has more than one point."""
    parts = []
    for number, workload in enumerate(dict.fromkeys(candidate.workload for candidate in candidates)):
        same = [candidate for candidate in candidates if candidate.workload == workload]
        if len(same) > 1:
            caption = f"{workload} tokens: what a GPU gives over what a user gets. No point beats those on the line."
            parts.append(figure(draw_pareto(same, f"{name}-{number}"), caption))
    return parts


def _distributions(load: Load, name: str, workload: str, points: list[LoadRow]) -> list[Markup]:
    """TTFT and ITL where answers were streamed, end-to-end latency where they were not."""
    kinds = [kind for kind in _DISTRIBUTIONS if (kind[0] == "e2e") != any(row.is_streaming for row in points)]
    parts = []
    for kind, title in kinds:
        samples = read_samples(load.directory, points, kind)
        if samples:
            svg = draw_distribution(samples, f"{name}-{kind}", title)
            parts.append(figure(svg, f"{title} at {workload} tokens, every request. Further left is better."))
    return parts
