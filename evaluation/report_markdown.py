"""``report.md``: the report as plain tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from evaluation.load.text import failed_load_points, load_tables
from evaluation.report_data import Findings
from evaluation.report_text import (
    ACCURACY_COLUMNS,
    BENCHMARK_COLUMNS,
    STAGE_COLUMNS,
    accuracy_cells,
    benchmark_cells,
    describe_provenance,
    failed_points,
    group_by_lengths,
    lengths_label,
    relative_path,
    stage_cells,
    summarise_findings,
)


def render_markdown(findings: Findings, results: Path) -> str:
    """Render the whole report.

    Args:
        findings: what to report.
        results: directory that log paths are shown relative to.
    """
    parts = [f"# {_escape(findings.title)}", _escape(summarise_findings(findings))]
    if findings.remarks:
        parts.append("\n".join(f"- {_escape(remark)}" for remark in findings.remarks))
    parts += _failed_stages(findings, results)
    for evaluation in findings.evaluations:
        parts.append(f"## Accuracy: {_escape(evaluation.task)}")
        parts.append(_table(ACCURACY_COLUMNS, map(accuracy_cells, evaluation.metrics)))
    for benchmark in findings.benchmarks:
        parts.append(f"## Latency and throughput: {_escape(benchmark.name)}")
        for lengths, rows in group_by_lengths(benchmark.measured).items():
            parts.append(f"### {lengths_label(lengths)} (tokens of each sequence)")
            parts.append(_table(BENCHMARK_COLUMNS, map(benchmark_cells, rows)))
        if benchmark.failed:
            parts.append("Failed points:")
            parts.append("\n".join(f"- {_escape(line)}" for line in failed_points(benchmark.failed)))
    for load in findings.loads:
        parts.append(f"## Under load: {_escape(load.name)}")
        for table in load_tables(load.measured):
            parts.append(f"### {_escape(table.caption)}")
            parts.append(_table(table.columns, table.rows))
        if load.failed:
            parts.append("Failed points:")
            parts.append("\n".join(f"- {_escape(line)}" for line in failed_load_points(load.failed)))
    if findings.stages:
        parts.append("## Stages")
        parts.append(_table(STAGE_COLUMNS, (stage_cells(outcome, results) for outcome in findings.stages)))
    parts.append("## Provenance")
    parts.append(_table(("What", "Value"), describe_provenance(findings)))
    return "\n\n".join(parts) + "\n"


def _failed_stages(findings: Findings, results: Path) -> list[str]:
    parts = []
    for outcome in findings.stages:
        if outcome.is_bad and (outcome.error or outcome.log):
            log = f" (log: {_escape(relative_path(outcome.log, results))})" if outcome.log else ""
            parts.append(f"**Stage {_escape(outcome.stage)}: {_escape(outcome.state)}**{log}")
            if outcome.error:
                parts.append("\n".join(f"    {line}" for line in outcome.error.splitlines()))
    return parts


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    numeric = ["---:" if column[-2:] in ("ms", "/s", "ze") or column == "Value" else "---" for column in columns]
    if columns[0] == "What":
        numeric = ["---"] * len(columns)
    lines = [columns, numeric, *([_escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape(text: str) -> str:
    """Keep text from being read as Markdown or HTML."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|#])", r"\\\1", text)
    # An underscore inside a word starts no emphasis; escaping it would only make names unreadable.
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
    return re.sub(r"\s*\n\s*", "<br>", text)
