"""A sweep's engines side by side, a column for each run: what it is, what it scored, and its speed at each load."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from evaluation.report.comparable import engines_of, why_not_comparable
from evaluation.report.formatting import TextTable, show_figure
from evaluation.report.sweep_points import Point
from evaluation.speed.tables.table import Row
from evaluation.tasks.metric import HOLDS

MISSING = "missing"
NOT_COMPARABLE = "not comparable"
FIGURE = "Figure"
_IDENTITY = {
    "Engine": "engine",
    "API": "endpoint_kind",
    "Versions": "versions",
    "Commit that measured": "commit",
    "Computes in": "data_type",
    "Weights in": "weight_data_type",
    "Tensor parallel": "tensor_para_size",
    "Pipeline parallel": "pipeline_para_size",
    "Flags": "flags",
    "GPU": "gpu",
    "Model's digest": "model_digest",
}
_SPEED = {
    "Latency p50, ms": "e2e_p50_ms",
    "Latency p99, ms": "e2e_p99_ms",
    "TTFT p50, ms": "ttft_p50_ms",
    "TTFT p99, ms": "ttft_p99_ms",
    "ITL p50, ms": "itl_p50_ms",
    "ITL p99, ms": "itl_p99_ms",
    "Requests/s": "requests_per_s",
    "Goodput, requests/s": "goodput_requests_per_s",
    "Output tokens/s": "output_tokens_per_s",
    "Output tokens/s/GPU": "output_tokens_per_s_per_gpu",
    "Output tokens/s/user": "output_tokens_per_s_per_user",
    "Energy of an output token, J": "gpu_energy_per_output_token_j",
    "Cost of 1M tokens": "cost_per_million_tokens",
    "Cost of 1M output tokens": "cost_per_million_output_tokens",
}
_LONG_HEX = r"\b([0-9a-f]{12})[0-9a-f]{20,}"
"""Commits and digests, of which the beginning tells two apart."""
Load = tuple[str, str]
"""Lengths, as ``60/20``, and the load's label, as ``concurrency 4``."""


def has_several_engines(points: Iterable[Point]) -> bool:
    """Return whether results of more than one engine are there."""
    return len(engines_of(_known(points))) > 1


def engine_tables(points: Sequence[Point]) -> list[TextTable]:
    """Make the tables of the engines: identity, parity and accuracy, then one for each load; none for one engine."""
    if not has_several_engines(points):
        return []
    shown = _known(points)
    names = column_names(shown)
    tables = [TextTable("The engines", (FIGURE, *names), tuple(_identity_rows(shown)))]
    for (workload, load), rows in rows_by_load(shown).items():
        cells = [(title, *(_speed_cell(row, name) for row in rows)) for title, name in _SPEED.items()]
        kept = tuple(line for line in cells if set(line[1:]) != {MISSING})
        tables.append(TextTable(f"{workload} tokens (in/out), {load}", (FIGURE, *names), kept))
    return tables


def column_names(points: Sequence[Point]) -> list[str]:
    """Name each run; one that cannot be compared with the other engines says so."""
    return [point.label if point.parity == HOLDS else f"{point.label} ({NOT_COMPARABLE})" for point in points]


def comparability_remarks(points: Sequence[Point]) -> list[str]:
    """Return for each run that is not comparable why it is not; nothing where there is one engine."""
    if not has_several_engines(points):
        return []
    reasons = [(point.label, why_not_comparable(point.parity, point.parity_reasons)) for point in _known(points)]
    return [f"{label} is {NOT_COMPARABLE} with other engines: {reason}." for label, reason in reasons if reason]


def rows_by_load(points: Sequence[Point]) -> dict[Load, list[Row | None]]:
    """Find the measured row of each point by load, None where a point has not measured that load."""
    found: dict[Load, dict[int, Row]] = {}
    for number, point in enumerate(points):
        for row in (row for benchmark in point.benchmarks for row in benchmark.measured):
            found.setdefault((row.workload, row.label), {}).setdefault(number, row)
    return {load: [rows.get(number) for number in range(len(points))] for load, rows in found.items()}


def speed_figure(row: Row, name: str) -> float | None:
    """Return a figure of a row; a static table has no throughput per GPU, which follows from what it has.

    None also for the throughput per GPU of an endpoint whose number of GPUs is unknown.
    """
    value = row.figures.get(name)
    total = row.figures.get("output_tokens_per_s")
    if value is None and name == "output_tokens_per_s_per_gpu" and total is not None and row.gpus:
        return total / row.gpus
    return value


def _known(points: Iterable[Point]) -> list[Point]:
    return [point for point in points if point.engine or point.benchmarks]


def _speed_cell(row: Row | None, name: str) -> str:
    return (show_figure(speed_figure(row, name)) if row is not None else "") or MISSING


def _identity_rows(points: Sequence[Point]) -> Iterable[tuple[str, ...]]:
    facts = [_facts(point) for point in points]
    for title, name in _IDENTITY.items():
        cells = [fact.get(name) or MISSING for fact in facts]
        if set(cells) != {MISSING}:
            yield title, *cells
    yield "Parity with the checkpoint", *(point.parity or MISSING for point in points)
    for name in dict.fromkeys(name for point in points for name in point.figures):
        yield name, *(point.figures.get(name) or MISSING for point in points)


def _facts(point: Point) -> Mapping[str, str]:
    """Return what identifies an engine: from its first measured row, else from what its evaluations say."""
    rows = [row for benchmark in point.benchmarks for row in benchmark.rows[:1]]
    told = {name: str(row.value(name) or "") for row in rows[:1] for name in _IDENTITY.values()}
    known = {**point.identity, **{name: text for name, text in told.items() if text}, "engine": point.engine}
    return {name: re.sub(_LONG_HEX, r"\1", text) for name, text in known.items()}
