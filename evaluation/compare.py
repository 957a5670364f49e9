"""Compare the reports of runs: ``python3 -m evaluation.compare RESULTS_A RESULTS_B [...]``.

The first run is the baseline of the others. A difference within the 95% intervals of both figures is called noise;
where an interval is unknown, only the difference is shown. Figures over other samples are not judged, nor those of rows
whose requests failed or piled up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evaluation.report.differences import Difference, cell, compare
from evaluation.report.formatting import TextTable
from evaluation.report.measurements import Report, read_report
from evaluation.report.page import render_page
from evaluation.speed.tables.cells import csv_text
from handover.durable import write_atomically
from handover.errors import ConfigError, exit_status

CSV_NAME, MARKDOWN_NAME, HTML_NAME = "compare.csv", "compare.md", "compare.html"
_USUAL = (
    *("*_accuracy*", "*perplexity", "*.exact", "*.f1", "*bleu*", "*rouge*", "*.exact_match*"),
    *("*.latency_mean_ms", "*.latency_p99_ms", "*.throughput_tokens_per_s"),
    *("*.requests_per_s", "*.output_tokens_per_s", "*.goodput_requests_per_s", "*.ttft_p50_ms", "*.ttft_p99_ms"),
    *("*.tpot_p50_ms", "*.itl_p99_ms", "*.e2e_p50_ms", "*.e2e_p99_ms", "*.server_memory_peak_bytes"),
)
_WIDTH_IN_A_LOG = 140


def main(argv: Sequence[str]) -> None:
    """Read, compare, print, and write the tables where asked to."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.compare", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="results directories; the first is the baseline")
    parser.add_argument("--only", nargs="+", default=list(_USUAL), metavar="PATTERN", help="figures by shell pattern")
    parser.add_argument("--all", action="store_true", help="every figure")
    parser.add_argument("--output", type=Path, help=f"directory for {CSV_NAME}, {MARKDOWN_NAME} and {HTML_NAME}")
    given = parser.parse_args(list(argv))
    if len(given.results) < 2:
        raise ConfigError("a comparison needs two results directories or more")
    reports = [read_report(path) for path in given.results]
    rows = compare(reports, ["*"] if given.all else given.only)
    if not rows:
        raise ConfigError("these reports have no such figure in common", "give --all, or other patterns to --only")
    names = labels(given.results)
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        write_atomically(given.output / CSV_NAME, render_csv(names, rows))
        described = describe_comparison(names, reports, rows)
        for name in (MARKDOWN_NAME, HTML_NAME):
            write_atomically(given.output / name, render_page(name, **described))
    _print(names, reports, rows)


def labels(paths: Sequence[Path]) -> list[str]:
    """Name the reports by what differs between their paths."""
    parts = [path.absolute().parts for path in paths]
    if len(set(parts)) < len(parts):
        return [f"{number}: {path.name}" for number, path in enumerate(paths, 1)]
    shortest = min(map(len, parts))
    first = next((n for n in range(shortest) if len({part[n] for part in parts}) > 1), shortest)
    last = next((n for n in range(shortest - first) if len({part[-1 - n] for part in parts}) > 1), shortest - first)
    return ["/".join(part[first : len(part) - last]) or part[-1] for part in parts]


def remarks(names: Sequence[str], reports: Sequence[Report]) -> list[str]:
    """Return the remarks on different models and machines, and those of each report."""
    said = []
    if len({report.digests for report in reports}) > 1:
        listed = "; ".join(f"{n}: {', '.join(d[:19] for d in r.digests)}" for n, r in zip(names, reports, strict=True))
        said.append(f"The reports are of different models ({listed}).")
    if len({report.machines for report in reports if report.machines}) > 1:
        listed = "; ".join(f"{n}: {' and '.join(r.machines)}" for n, r in zip(names, reports, strict=True))
        said.append(f"They were measured on different machines ({listed}).")
    return said + [f"{name}: {remark}" for name, r in zip(names, reports, strict=True) for remark in r.remarks]


def render_csv(names: Sequence[str], rows: dict[str, list[Difference]]) -> str:
    """Render one line a figure, and for each report its value, interval, change and verdict."""
    parts = ("value", "ci95", "change_percent", "verdict", "ci95_low", "ci95_high")
    table: list[list[object]] = [["figure", *(f"{name} {part}" for name in names for part in parts)]]
    for figure, differences in rows.items():
        table.append([figure])
        for shown in differences:
            change = None if shown.change is None else 100 * shown.change
            table[-1] += [shown.value, shown.noise, change, shown.verdict, *(shown.interval or (None, None))]
    return csv_text(table)


def describe_comparison(
    names: Sequence[str], reports: Sequence[Report], rows: dict[str, list[Difference]]
) -> dict[str, Any]:
    """Describe the comparison by the names that the templates ``compare.html`` and ``compare.md`` use."""
    cells = {figure: [cell(figure, each) for each in differences] for figure, differences in rows.items()}
    texts = tuple((figure, *("  ".join(each).strip() for each in shown)) for figure, shown in cells.items())
    return {
        "title": "Comparison",
        "summary": f"{len(rows)} figures of {len(names)} reports; changes are relative to {names[0]}.",
        "remarks": remarks(names, reports),
        "names": list(names),
        "figures": TextTable("", ("Figure", *names), texts),
        "rows": [
            (figure, [(*shown, each.verdict) for shown, each in zip(cells[figure], differences, strict=True)])
            for figure, differences in rows.items()
        ],
    }


def _print(names: Sequence[str], reports: Sequence[Report], rows: dict[str, list[Difference]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_IN_A_LOG, highlight=False)
    table = Table()
    table.add_column("Figure", overflow="fold")
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    colours = {"better": "green", "worse": "red"}
    for figure, differences in rows.items():
        cells = (Text("  ".join(cell(figure, d)).strip(), style=colours.get(d.verdict, "")) for d in differences)
        table.add_row(Text(figure), *cells)
    console.print(table)
    for remark in remarks(names, reports):
        console.print(Text(remark, style="yellow"))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "compare"))
