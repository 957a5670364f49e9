"""``report.html``: the report as one self-contained page."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from evaluation.report.data import Benchmark, Evaluation, Findings, StageOutcome
from evaluation.report.judgement import Judgement
from evaluation.report.load_findings import Load
from evaluation.report.load_html import load_parts, pareto_parts
from evaluation.report.load_text import NUMERIC as LOAD_NUMERIC
from evaluation.report.load_text import Table
from evaluation.report.page import Cell, figure, part, problems, render_page, section, style_of, table
from evaluation.report.plots import draw_latency, draw_throughput
from evaluation.report.ranking_text import RANKING_COLUMNS, Budget, candidate_cells, ranking_title
from evaluation.report.recommendation import OFFLINE, ONLINE, find_candidates, rank
from evaluation.report.text import (
    ACCURACY_COLUMNS,
    BASELINE_COLUMNS,
    BENCHMARK_COLUMNS,
    GATE_COLUMNS,
    STAGE_COLUMNS,
    accuracy_cells,
    baseline_cells,
    benchmark_cells,
    describe_provenance,
    group_by_lengths,
    lengths_label,
    relative_path,
    stage_cells,
    summarise_findings,
    verdict_sentence,
)

_PARAGRAPH = Markup("<p>{}</p>")
_TOP = 5
_NUMERIC = frozenset(
    {
        *LOAD_NUMERIC,
        *RANKING_COLUMNS[1:-1],
        *BENCHMARK_COLUMNS,
        *BASELINE_COLUMNS,
        "Value",
        "Std. error",
        "Samples",
        "Time",
    }
)


def render_html(findings: Findings, results: Path, judgement: Judgement | None = None) -> str:
    """Render the whole report.

    Args:
        findings: what to report.
        results: directory that log paths are shown relative to.
        judgement: what the figures are held against.
    """
    evaluations = findings.evaluations
    sections = [
        *_problems(findings, results, judgement),
        *_gate(judgement),
        *(section(f"Accuracy: {each.task}", _accuracy(each, judgement)) for each in evaluations),
        *(_benchmark(benchmark, f"plot{number}") for number, benchmark in enumerate(findings.benchmarks)),
        *(_load(load, f"load{number}") for number, load in enumerate(findings.loads)),
        *_recommendation(findings, results),
        *_stages(findings, results),
        section("Provenance", part("facts", describe_provenance(findings))),
    ]
    return render_page(findings.title, summarise_findings(findings, judgement), sections)


def _problems(findings: Findings, results: Path, judgement: Judgement | None) -> list[Markup]:
    stages = Markup("").join(_failed_stage(outcome, results) for outcome in findings.stages if outcome.is_bad)
    return problems([*findings.remarks, *(judgement.remarks if judgement else ())], stages)


def _gate(judgement: Judgement | None) -> list[Markup]:
    if judgement is None or not judgement.checks:
        return []
    rows = [(check.figure, check.rule, check.verdict, check.reason) for check in judgement.checks]
    return [section(f"Gate: {judgement.verdict}", table(GATE_COLUMNS, rows, _NUMERIC))]


def _failed_stage(outcome: StageOutcome, results: Path) -> Markup:
    log = relative_path(outcome.log, results) if outcome.log else ""
    return part("failed_stage", outcome.label, outcome.state, log, outcome.error)


def _accuracy(evaluation: Evaluation, judgement: Judgement | None) -> Markup:
    # The definitions stand below the names: as a column they would leave a phone no room for the figures.
    rows: list[list[str | Cell]] = []
    said = verdict_sentence(evaluation)
    has_baseline = judgement is not None and judgement.baseline is not None
    for metric in evaluation.metrics:
        name, *figures, definition = accuracy_cells(metric)
        cells: list[str | Cell] = [Cell(name, note=definition), *figures]
        if judgement is not None and has_baseline:
            before, change, verdict = baseline_cells(evaluation.task, metric, judgement)
            cells += [before, Cell(change, style=style_of(verdict))]
        rows.append(cells)
    columns = (*ACCURACY_COLUMNS[:4], *(BASELINE_COLUMNS if has_baseline else ()))
    return (_PARAGRAPH.format(said) if said else Markup("")) + table(columns, rows, _NUMERIC)


def _benchmark(benchmark: Benchmark, name: str) -> Markup:
    parts = []
    if benchmark.measured:
        parts.append(
            figure(
                draw_latency(benchmark.measured, f"{name}-latency"),
                "Latency over batch size. Points are means, whiskers reach from p50 to p99.",
            )
        )
        parts.append(
            figure(
                draw_throughput(benchmark.measured, f"{name}-throughput"),
                "Throughput over latency. The numbers at the points are batch sizes; up and left is better.",
            )
        )
    for lengths, rows in group_by_lengths(benchmark.rows).items():
        caption = f"{lengths_label(lengths)} (tokens of each sequence)"
        cells = [(benchmark_cells(row), row.error) for row in rows]
        parts.append(
            table(BENCHMARK_COLUMNS, (row for row, _ in cells), _NUMERIC, caption, [error for _, error in cells])
        )
    return section(f"Latency and throughput: {benchmark.name}", *parts)


def _load(load: Load, name: str) -> Markup:
    def show(content: Table) -> Markup:
        return table(content.columns, content.rows, _NUMERIC, content.caption, content.errors)

    return section(f"Under load: {load.name}", *load_parts(load, name, show))


def _recommendation(findings: Findings, results: Path) -> list[Markup]:
    """Show what to run for throughput alone, and what each point is worth to a user and to the operator."""
    candidates = find_candidates(findings, str(results))
    if len(candidates) < 2 or not findings.loads:
        return []
    parts = pareto_parts(candidates, "pareto")
    budget = Budget({name: limit for load in findings.loads for name, limit in load.slos.items()})
    rankings = rank(candidates, OFFLINE, {}, budget.percentile, _TOP)
    if budget.limits_ms:
        rankings += rank(candidates, ONLINE, budget.limits_ms, budget.percentile, _TOP)
    for ranking in rankings:
        rows = [candidate_cells(ranking, candidate)[:-1] for candidate in ranking.best]  # all of one deployment
        title = ranking_title(ranking, budget)
        if rows:
            parts.append(table(RANKING_COLUMNS[:-1], rows, _NUMERIC, title))
        else:
            parts.append(_PARAGRAPH.format(f"{title}: none of {ranking.considered} measured points keeps the budget."))
    return [section("Recommendation", *parts)]


def _stages(findings: Findings, results: Path) -> list[Markup]:
    if not findings.stages:
        return []
    rows = (stage_cells(outcome, results) for outcome in findings.stages)
    return [section("Stages", table(STAGE_COLUMNS, rows, _NUMERIC))]
