"""Write the report of a run: ``python3 -m evaluation.report --results=... --output=... --title=... --stages=...``.

Writes ``report.md`` and ``report.html`` (one self-contained page) over whatever the run left, also where a stage
failed, and NeMo Evaluator's ``results.yml`` where there is accuracy; prints the tables and, as the last line, the path
of the page.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evaluation.arguments import ReportArguments
from evaluation.report.data import Findings, collect_findings
from evaluation.report.document import describe_report
from evaluation.report.judgement import judge
from evaluation.report.nemo_evaluator import FILE_NAME as RESULTS_NAME
from evaluation.report.nemo_evaluator import render_results
from evaluation.report.page import render_page
from evaluation.report.published import PARTIAL
from evaluation.report.reported import card_figures, reported_files
from evaluation.report.tables import LOAD, brief_tables, failed_points
from evaluation.report.text import ACCURACY_COLUMNS, accuracy_cells, relative_path
from handover.durable import write_atomically
from handover.manifest import Manifest, record_files
from handover.provenance import read_commit
from handover.signatures.sealing import Seal

MARKDOWN_NAME = "report.md"
HTML_NAME = "report.html"
_WIDTH_IN_A_LOG = 110


def main(argv: Sequence[str]) -> None:
    """Collect, write both files and the manifest, and print the tables."""
    arguments = ReportArguments.from_argv(argv, description=__doc__)
    seal = Seal.open(arguments)
    findings = collect_findings(arguments.results, arguments.title, arguments.stages)
    judgement = judge(arguments.results, arguments.baseline, arguments.thresholds)
    arguments.output.mkdir(parents=True, exist_ok=True)
    described = describe_report(findings, arguments.results, judgement)
    for name in (MARKDOWN_NAME, HTML_NAME):
        write_atomically(arguments.output / name, render_page(name, **described))
    if accuracy := render_results(findings):
        write_atomically(arguments.output / RESULTS_NAME, accuracy)
    made_from = {"results": str(arguments.results), "title": arguments.title}
    manifest = Manifest("report", record_files(arguments.output), made_from, {"commit": read_commit()})
    seal.finish("report", arguments.output, manifest, reported_files(arguments.results), card_figures(findings))
    print_tables(_console(), findings, arguments.results)
    # The runner renames the directory when the report is complete; the path after that is what helps.
    published = arguments.output.with_name(arguments.output.name.removesuffix(PARTIAL))
    print(published / HTML_NAME)


def print_tables(console: Console, findings: Findings, results: Path) -> None:
    """Print accuracy by figure, latency and throughput by batch size, and everything that failed."""
    for evaluation in findings.evaluations:
        rows = [accuracy_cells(metric)[:4] for metric in evaluation.metrics]
        console.print(_table(f"{evaluation.heading}: {findings.title}", ACCURACY_COLUMNS[:4], rows))
    for benchmark in findings.benchmarks:
        for content in brief_tables(benchmark):
            console.print(_table(f"{benchmark.name}: {content.caption}", content.columns, content.rows))
        for line in failed_points(benchmark):
            console.print(Text(f"failed: {line}", style="red"))
    for remark in findings.remarks:
        console.print(Text(remark, style="yellow"))
    for outcome in findings.stages:
        if outcome.is_bad:
            log = f", log {relative_path(outcome.log, results)}" if outcome.log else ""
            console.print(Text(f"stage {outcome.label}: {outcome.state}{log}", style="red"))


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    # Text, not str: rich would read square brackets in a name as markup.
    table = Table(title=Text(title, style="bold"), title_justify="left")
    for column in columns:
        table.add_column(
            column,
            justify="left" if column == ACCURACY_COLUMNS[0] else "right",
            overflow="fold",
            no_wrap=column == LOAD,
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _console() -> Console:
    # The runner passes a terminal on through a pipe and says so.
    terminal = sys.stdout.isatty() or os.environ.get("SLIPWAY_TERMINAL") == "1"
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH_IN_A_LOG
    return Console(force_terminal=terminal, width=width, highlight=False)
