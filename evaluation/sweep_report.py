"""One report over all points of a sweep: ``python3 -m evaluation.sweep_report --sweep=DIRECTORY``.

Reads ``points.json`` there (written by the launcher) and what each point measured so far; writes ``report.html``,
``report.md`` and ``points.csv``. Every point renders it again when it is done, so the last one completes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evaluation.arguments import SweepReportArguments
from evaluation.report.comparable import COMPARABLE, group_comparable
from evaluation.report.document import pareto_plots
from evaluation.report.engine_plots import engine_plots
from evaluation.report.engine_tables import comparability_remarks, engine_tables, has_several_engines
from evaluation.report.formatting import TextTable, show_figure
from evaluation.report.page import Plot, render_page
from evaluation.report.plots import draw_latency_by_size
from evaluation.report.ranking import RANKING_COLUMNS, Budget, DeploymentCandidate, rank_all, ranking_table
from evaluation.report.sweep_points import Point, read_points, smallest_loads, sweep_columns, sweep_rows
from evaluation.speed.tables.cells import csv_text
from evaluation.tasks.metric import HOLDS
from handover.durable import write_atomically
from handover.errors import exit_status

HTML_NAME, MARKDOWN_NAME, CSV_NAME = "report.html", "report.md", "points.csv"
_OF_THE_RUN = ("engine", "parity", "is_comparable")
_OF_THE_ROW = (
    *(
        "versions",
        "commit",
        "data_type",
        "weight_data_type",
        "flags",
        "gpu",
        "requests_per_s",
        "goodput_requests_per_s",
    ),
    *("gpu_energy_per_output_token_j", "cost_per_million_tokens", "cost_per_million_output_tokens"),
    *("timestamp", "started_at", "cpu", "cores", "gpus", "is_stable", "requests", "failed_requests"),
    *("request_rate_per_s", "offered_requests_per_s", "slo_verdict", "is_random_weights"),
    *("validity", "validity_reasons", "schema_version"),
)


def main(argv: Sequence[str]) -> None:
    """Render the report, and again if points on other nodes have finished in the meantime."""
    directory = SweepReportArguments.from_argv(argv, description=__doc__).sweep
    points = read_points(directory)
    while True:
        write_atomically(directory / CSV_NAME, render_csv(points))
        described = describe_sweep(points)
        write_atomically(directory / MARKDOWN_NAME, render_page("sweep.md", **described))
        write_atomically(directory / HTML_NAME, render_page("sweep.html", **described))
        newer = read_points(directory)
        if newer == points:
            break
        points = newer
    print(f"sweep: {summarise(points)}")
    print(directory / HTML_NAME)


def summarise(points: Sequence[Point]) -> str:
    """Summarise the progress of the sweep, its highest throughput and its shortest latency."""
    measured = [point for point in points if point.candidates]
    torn = sum(bool(point.error) for point in measured)
    text = f"{len(measured)} of {len(points)} points are measured{f', {torn} of them failed in part' if torn else ''}."
    if not measured:
        return text
    owners = _labels(points)
    groups = group_comparable(_candidates(points))
    if COMPARABLE not in groups:
        return f"{text} The engines are not comparable, so none is called the fastest."
    candidates = [candidate for candidate in groups[COMPARABLE] if not candidate.validity_reasons]
    if not candidates:
        return f"{text} None is valid: {groups[COMPARABLE][0].validity_reasons}."
    fastest = max(candidates, key=lambda c: c.tokens_per_s)
    text += (
        f" Most throughput: {owners[id(fastest)]}, {show_figure(fastest.tokens_per_s)} tokens/s"
        f" ({fastest.load}, {fastest.workload} tokens)."
    )
    shortest = min(smallest_loads(candidates), key=lambda c: c.latencies_ms.get("e2e_p50_ms") or float("inf"))
    if shortest.latencies_ms.get("e2e_p50_ms") is not None:
        text += (
            f" Shortest latency: {owners[id(shortest)]}, {show_figure(shortest.latencies_ms['e2e_p50_ms'])} ms"
            f" ({shortest.load}, {shortest.workload} tokens)."
        )
    return text


def describe_sweep(points: Sequence[Point]) -> dict[str, Any]:
    """Describe the report by the names that the templates ``sweep.html`` and ``sweep.md`` use."""
    columns = sweep_columns(points)
    errors = tuple("" if point.candidates or point.accuracies else point.error for point in points)
    plots = [
        Plot(
            draw_latency_by_size(sizes, f"size{number}"),
            f"Latency by model size: {workload}. Mean of a request; a line for each parallelism.",
        )
        for number, (workload, sizes) in enumerate(_sizes(points).items())
    ]
    named = [replace(c, load=f"{point.label}, {c.load}") for point in points for c in point.candidates]
    places = tuple((point.label, point.title, point.results, point.digest) for point in points)
    return {
        "title": "Sweep",
        "summary": summarise(points),
        "remarks": _remarks(points),
        "points": TextTable("The points", columns, tuple(sweep_rows(points, columns)), errors),
        "engines": engine_tables(points),
        "plots": [*plots, *(engine_plots(points, "engines") or pareto_plots(named, "pareto"))],
        "rankings": _rankings(points),
        "places": TextTable("", ("Point", "Model", "Results", "Digest"), places),
        "numeric": {*columns[1:], *RANKING_COLUMNS[1:-1]},
    }


def render_csv(points: Sequence[Point]) -> str:
    """Render a row for each measured load of each point; a point without any has one row with its error."""
    latencies = list(dict.fromkeys(name for candidate in _candidates(points) for name in candidate.latencies_ms))
    names = ("tokens_per_s", "ci95_tokens_per_s", "tokens_per_s_per_gpu", "tokens_per_s_per_user")
    heads = ("point", "model", "parameters", "results", "error", "benchmark", "workload", "load", *names, *latencies)
    rows: list[tuple[object, ...]] = [(*heads, "model_digest", *_OF_THE_RUN, *_OF_THE_ROW)]
    is_one_engine = not has_several_engines(points)
    for point in points:
        measured = {(b.name, row.workload, row.label): row for b in point.benchmarks for row in b.measured}
        known = (point.label, point.title, point.parameters or "", point.results, point.error)
        for c in point.candidates:
            figures = (c.tokens_per_s, c.noise_tokens_per_s, c.tokens_per_s_per_gpu, c.tokens_per_s_per_user)
            found = (c.latencies_ms.get(name) for name in latencies)
            run = (c.engine, point.parity, is_one_engine or point.parity == HOLDS)
            row = measured[c.benchmark, c.workload, c.load]
            further = (*run, *(row.value(name) for name in _OF_THE_ROW))
            rows.append((*known, c.benchmark, c.workload, c.load, *figures, *found, c.model_digest, *further))
        if not point.candidates:
            rows.append((*known, *[""] * (len(rows[0]) - len(known))))
    return csv_text(rows)


def _candidates(points: Sequence[Point]) -> list[DeploymentCandidate]:
    return [candidate for point in points for candidate in point.candidates]


def _labels(points: Sequence[Point]) -> dict[int, str]:
    """Names of the points by the identity of their candidates: two points may have measured the same."""
    return {id(candidate): point.label for point in points for candidate in point.candidates}


def _rankings(points: Sequence[Point]) -> list[TextTable]:
    """Rank all loads of all points, also within the budget that the points' loads were given."""
    budget, labels = Budget({name: limit for point in points for name, limit in point.slos_ms.items()}), _labels(points)
    rankings = rank_all(_candidates(points), budget)
    return [ranking_table(ranking, budget, lambda candidate: labels[id(candidate)]) for ranking in rankings]


def _sizes(points: Sequence[Point]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return parameters and mean latency of each model, by workload at its smallest load, then by parallelism.

    Workloads that models of only one size were measured with are left out.
    """
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for point in points:
        for candidate in smallest_loads(point.candidates):
            mean_ms = candidate.latencies_ms.get("e2e_mean_ms")
            if point.parameters and mean_ms is not None:
                lines = found.setdefault(f"{candidate.workload} tokens, {candidate.load}", {})
                lines.setdefault(point.parallelism, []).append((float(point.parameters), mean_ms))
    return {
        workload: {name: sorted(values) for name, values in lines.items()}
        for workload, lines in found.items()
        if len({size for values in lines.values() for size, _ in values}) > 1
    }


def _remarks(points: Sequence[Point]) -> list[str]:
    said = [f"{point.label} failed: {point.error}" for point in points if point.error]
    said += comparability_remarks(points)
    said += [f"{point.label}: {remark}" for point in points for remark in point.remarks]
    waiting = [point.label for point in points if not point.error and not point.candidates and not point.remarks]
    return said + ([f"Not measured yet: {'; '.join(waiting)}."] if waiting else [])


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "sweep"))
