"""``report.md``: the report as plain tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evaluation.report.data import Evaluation, Findings
from evaluation.report.formatting import escape_markdown, markdown_table
from evaluation.report.judgement import Judgement
from evaluation.report.tables import NUMERIC, benchmark_heading, benchmark_tables, failed_points
from evaluation.report.text import (
    ACCURACY_COLUMNS,
    BASELINE_COLUMNS,
    GATE_COLUMNS,
    STAGE_COLUMNS,
    accuracy_cells,
    baseline_cells,
    describe_provenance,
    relative_path,
    stage_cells,
    summarise_findings,
    verdict_sentence,
)


def render_markdown(findings: Findings, results: Path, judgement: Judgement | None = None) -> str:
    """Render the whole report.

    Args:
        findings: what to report.
        results: directory that log paths are shown relative to.
        judgement: what the figures are held against.
    """
    parts = [f"# {escape_markdown(findings.title)}", escape_markdown(summarise_findings(findings, judgement))]
    parts += _remarks([*findings.remarks, *(judgement.remarks if judgement else ())])
    parts += _failed_stages(findings, results)
    parts += _gate(judgement)
    for evaluation in findings.evaluations:
        parts.append(f"## Accuracy: {escape_markdown(evaluation.task)}")
        parts += [escape_markdown(said)] if (said := verdict_sentence(evaluation)) else []
        parts.append(_accuracy(evaluation, judgement))
    for benchmark in findings.benchmarks:
        parts.append(f"## {escape_markdown(benchmark_heading(benchmark))}")
        for table in benchmark_tables(benchmark, benchmark.measured):
            parts.append(f"### {escape_markdown(table.caption)}")
            parts.append(markdown_table(table.columns, table.rows, NUMERIC))
        if benchmark.failed:
            parts.append("Failed points:")
            parts.append("\n".join(f"- {escape_markdown(line)}" for line in failed_points(benchmark)))
    if findings.stages:
        parts.append("## Stages")
        parts.append(markdown_table(STAGE_COLUMNS, (stage_cells(outcome, results) for outcome in findings.stages)))
    parts.append("## Provenance")
    parts.append(markdown_table(("What", "Value"), describe_provenance(findings)))
    return "\n\n".join(parts) + "\n"


def _remarks(remarks: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {escape_markdown(remark)}" for remark in remarks)] if remarks else []


def _gate(judgement: Judgement | None) -> list[str]:
    if judgement is None or not judgement.checks:
        return []
    rows = ((check.figure, check.rule, check.verdict, check.reason) for check in judgement.checks)
    return [f"## Gate: {judgement.verdict}", markdown_table(GATE_COLUMNS, rows)]


def _accuracy(evaluation: Evaluation, judgement: Judgement | None) -> str:
    columns = [*ACCURACY_COLUMNS]
    rows = [[*accuracy_cells(metric)] for metric in evaluation.metrics]
    if judgement is not None and judgement.baseline is not None:
        columns[4:4] = BASELINE_COLUMNS
        for row, metric in zip(rows, evaluation.metrics, strict=True):
            row[4:4] = baseline_cells(evaluation.task, metric, judgement)[:2]
    return markdown_table(columns, rows, columns[1:-1])


def _failed_stages(findings: Findings, results: Path) -> list[str]:
    parts = []
    for outcome in findings.stages:
        if outcome.is_bad and (outcome.error or outcome.log):
            log = f" (log: {escape_markdown(relative_path(outcome.log, results))})" if outcome.log else ""
            parts.append(f"**Stage {escape_markdown(outcome.label)}: {escape_markdown(outcome.state)}**{log}")
            if outcome.error:
                parts.append("\n".join(f"    {line}" for line in outcome.error.splitlines()))
    return parts
