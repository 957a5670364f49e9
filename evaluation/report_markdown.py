"""``report.md``: the report as plain tables."""

from __future__ import annotations

from pathlib import Path

from evaluation.load.text import NUMERIC, failed_load_points, load_tables
from evaluation.markdown import escape_markdown, markdown_table
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
    parts = [f"# {escape_markdown(findings.title)}", escape_markdown(summarise_findings(findings))]
    if findings.remarks:
        parts.append("\n".join(f"- {escape_markdown(remark)}" for remark in findings.remarks))
    parts += _failed_stages(findings, results)
    for evaluation in findings.evaluations:
        parts.append(f"## Accuracy: {escape_markdown(evaluation.task)}")
        parts.append(markdown_table(ACCURACY_COLUMNS, map(accuracy_cells, evaluation.metrics), ACCURACY_COLUMNS[1:4]))
    for benchmark in findings.benchmarks:
        parts.append(f"## Latency and throughput: {escape_markdown(benchmark.name)}")
        for lengths, rows in group_by_lengths(benchmark.measured).items():
            parts.append(f"### {lengths_label(lengths)} (tokens of each sequence)")
            parts.append(markdown_table(BENCHMARK_COLUMNS, map(benchmark_cells, rows), BENCHMARK_COLUMNS))
        if benchmark.failed:
            parts.append("Failed points:")
            parts.append("\n".join(f"- {escape_markdown(line)}" for line in failed_points(benchmark.failed)))
    for load in findings.loads:
        parts.append(f"## Under load: {escape_markdown(load.name)}")
        for table in load_tables(load.measured):
            parts.append(f"### {escape_markdown(table.caption)}")
            parts.append(markdown_table(table.columns, table.rows, NUMERIC))
        if load.failed:
            parts.append("Failed points:")
            parts.append("\n".join(f"- {escape_markdown(line)}" for line in failed_load_points(load.failed)))
    if findings.stages:
        parts.append("## Stages")
        parts.append(markdown_table(STAGE_COLUMNS, (stage_cells(outcome, results) for outcome in findings.stages)))
    parts.append("## Provenance")
    parts.append(markdown_table(("What", "Value"), describe_provenance(findings)))
    return "\n\n".join(parts) + "\n"


def _failed_stages(findings: Findings, results: Path) -> list[str]:
    parts = []
    for outcome in findings.stages:
        if outcome.is_bad and (outcome.error or outcome.log):
            log = f" (log: {escape_markdown(relative_path(outcome.log, results))})" if outcome.log else ""
            parts.append(f"**Stage {escape_markdown(outcome.stage)}: {escape_markdown(outcome.state)}**{log}")
            if outcome.error:
                parts.append("\n".join(f"    {line}" for line in outcome.error.splitlines()))
    return parts
