"""``report.html``: the report as one self-contained page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from evaluation.load.findings import Load
from evaluation.load.html import load_parts, pareto_parts
from evaluation.load.text import NUMERIC as LOAD_NUMERIC
from evaluation.load.text import Table
from evaluation.plots import draw_latency, draw_throughput
from evaluation.ranking_text import RANKING_COLUMNS, Budget, candidate_cells, ranking_title
from evaluation.recommendation import OFFLINE, ONLINE, find_candidates, rank
from evaluation.report_data import Benchmark, Evaluation, Findings, StageOutcome
from evaluation.report_text import (
    ACCURACY_COLUMNS,
    BENCHMARK_COLUMNS,
    STAGE_COLUMNS,
    accuracy_cells,
    benchmark_cells,
    describe_provenance,
    group_by_lengths,
    lengths_label,
    relative_path,
    stage_cells,
    summarise_findings,
)

TEMPLATE = Path(__file__).with_name("report_template.html")
_TOP = 5
_NUMERIC = frozenset(
    {*LOAD_NUMERIC, *RANKING_COLUMNS[1:-1], *BENCHMARK_COLUMNS, "Value", "Std. error", "Samples", "Time"}
)


def render_html(findings: Findings, results: Path) -> str:
    """Render the whole report; every text that comes from outside is escaped.

    Args:
        findings: what to report.
        results: directory that log paths are shown relative to.
    """
    sections = [
        *_problems(findings, results),
        *(_section(f"Accuracy: {evaluation.task}", _accuracy(evaluation)) for evaluation in findings.evaluations),
        *(_benchmark(benchmark, f"plot{number}") for number, benchmark in enumerate(findings.benchmarks)),
        *(_load(load, f"load{number}") for number, load in enumerate(findings.loads)),
        *_recommendation(findings, results),
        *_stages(findings, results),
        _section("Provenance", _provenance(describe_provenance(findings))),
    ]
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(findings.title), summary=escape(summarise_findings(findings)), sections="\n".join(sections)
    )


def _problems(findings: Findings, results: Path) -> list[str]:
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in findings.remarks)
    stages = "".join(_failed_stage(outcome, results) for outcome in findings.stages if outcome.is_bad)
    if not remarks and not stages:
        return []
    listed = f"<ul>{remarks}</ul>" if remarks else ""
    return [f'<section class="problems"><h2>What to know first</h2>{stages}{listed}</section>']


def _failed_stage(outcome: StageOutcome, results: Path) -> str:
    log = f" Log: <code>{escape(relative_path(outcome.log, results))}</code>" if outcome.log else ""
    error = f"<pre>{escape(outcome.error)}</pre>" if outcome.error else ""
    return f"<p><strong>Stage {escape(outcome.stage)}: {escape(outcome.state)}.</strong>{log}</p>{error}"


def _accuracy(evaluation: Evaluation) -> str:
    # The definitions stand below the names: as a column they would leave a phone no room for the figures.
    rows = []
    for name, *figures, definition in map(accuracy_cells, evaluation.metrics):
        cells = "".join(f'<td class="number">{escape(figure)}</td>' for figure in figures)
        rows.append(f"<tr><td>{escape(name)}<small>{escape(definition)}</small></td>{cells}</tr>")
    return _frame(ACCURACY_COLUMNS[:4], rows)


def _benchmark(benchmark: Benchmark, name: str) -> str:
    parts = []
    if benchmark.measured:
        parts.append(
            _figure(
                draw_latency(benchmark.measured, f"{name}-latency"),
                "Latency over batch size. Points are means, whiskers reach from p50 to p99.",
            )
        )
        parts.append(
            _figure(
                draw_throughput(benchmark.measured, f"{name}-throughput"),
                "Throughput over latency. The numbers at the points are batch sizes; up and left is better.",
            )
        )
    for lengths, rows in group_by_lengths(benchmark.rows).items():
        caption = f"{lengths_label(lengths)} (tokens of each sequence)"
        cells = [(benchmark_cells(row), row.error) for row in rows]
        parts.append(_table(BENCHMARK_COLUMNS, (row for row, _ in cells), caption, [error for _, error in cells]))
    return _section(f"Latency and throughput: {benchmark.name}", "".join(parts))


def _load(load: Load, name: str) -> str:
    def table(content: Table) -> str:
        return _table(content.columns, content.rows, content.caption, content.errors)

    return _section(f"Under load: {load.name}", "".join(load_parts(load, name, _figure, table)))


def _recommendation(findings: Findings, results: Path) -> list[str]:
    """Show what to run for throughput alone, and what each point is worth to a user and to the operator."""
    candidates = find_candidates(findings, str(results))
    if len(candidates) < 2 or not findings.loads:
        return []
    parts = pareto_parts(candidates, "pareto", _figure)
    budget = Budget({name: limit for load in findings.loads for name, limit in load.slos.items()})
    rankings = rank(candidates, OFFLINE, {}, budget.percentile, _TOP)
    if budget.limits_ms:
        rankings += rank(candidates, ONLINE, budget.limits_ms, budget.percentile, _TOP)
    for ranking in rankings:
        rows = [candidate_cells(ranking, candidate) for candidate in ranking.best]
        parts.append(_table(RANKING_COLUMNS, rows, ranking_title(ranking, budget)))
        if not rows:
            parts.append(f"<p>None of {ranking.considered} measured points keeps the budget.</p>")
    return [_section("Recommendation", "".join(parts))]


def _stages(findings: Findings, results: Path) -> list[str]:
    if not findings.stages:
        return []
    rows = (stage_cells(outcome, results) for outcome in findings.stages)
    return [_section("Stages", _table(STAGE_COLUMNS, rows))]


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{content}</section>"


def _figure(svg: str, caption: str) -> str:
    return f'<figure class="plot">{svg}<figcaption>{escape(caption)}</figcaption></figure>'


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", errors: Sequence[str] | None = None
) -> str:
    """Render a table; a row with an error shows it in place of its figures."""

    def cell(column: str, text: str) -> str:
        return f'<td class="number">{escape(text)}</td>' if column in _NUMERIC else f"<td>{escape(text)}</td>"

    lines = []
    for number, row in enumerate(rows):
        error = errors[number] if errors else ""
        if error:
            failed = f'<td class="failed" colspan="{len(columns) - 1}"><span>failed: {escape(error)}</span></td>'
            lines.append(f"<tr>{cell(columns[0], row[0])}{failed}</tr>")
        else:
            lines.append(f"<tr>{''.join(cell(*pair) for pair in zip(columns, row, strict=True))}</tr>")
    return _frame(columns, lines, caption)


def _frame(columns: Sequence[str], rows: Sequence[str], caption: str = "") -> str:
    heads = "".join(
        '<th scope="col"' + (' class="number">' if column in _NUMERIC else ">") + f"{escape(column)}</th>"
        for column in columns
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="wide"><table>{title}{body}</table></div>'


def _provenance(facts: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in facts) + "</dl>"


def style_of(verdict: str) -> str:
    """CSS class of a cell with a verdict of a comparison."""
    return {"better": "better", "worse": "worse"}.get(verdict, "")
