"""Put reports side by side: ``python3 -m evaluation.compare RESULTS_A RESULTS_B [...]``.

The first is what the others are compared with. A difference that is smaller than the 95% intervals of both allow is
called noise; where an interval is not known, only the difference is shown.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evaluation.report.formatting import show_figure
from evaluation.report.measurements import HIGHER, Measurement, Report, read_report
from evaluation.report.page import render_page
from evaluation.speed.cells import render
from handover.durable import write_atomically
from handover.errors import ConfigError, exit_status
from handover.progress import human_bytes

CSV_NAME, MARKDOWN_NAME, HTML_NAME = "compare.csv", "compare.md", "compare.html"
_USUAL = (
    *("*_accuracy*", "*perplexity", "*.exact", "*.f1", "*bleu*", "*rouge*", "*.exact_match*"),
    *("*.latency_mean_ms", "*.latency_p99_ms", "*.throughput_tokens_per_s"),
    *("*.requests_per_s", "*.output_tokens_per_s", "*.goodput_requests_per_s", "*.ttft_p50_ms", "*.ttft_p99_ms"),
    *("*.tpot_p50_ms", "*.itl_p99_ms", "*.e2e_p50_ms", "*.e2e_p99_ms", "*.server_memory_peak_bytes"),
)
_WIDTH_IN_A_LOG = 140


@dataclass(frozen=True)
class Difference:
    """One figure of one report against the first report's.

    Attributes:
        value: there; None where it is missing.
        noise: half of its 95% interval; None where unknown.
        change: relative to the first; None where one is missing or the first is 0.
        verdict: ``better``, ``worse``, ``noise``, ``equal``, or empty where it cannot be said.
        delta: to the first, in the figure's unit; None as for ``change``.
        is_fraction: whether it is shown in percent.
    """

    value: float | None
    noise: float | None
    change: float | None
    verdict: str
    delta: float | None = None
    is_fraction: bool = False


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
        write_atomically(given.output / MARKDOWN_NAME, render_markdown(names, reports, rows))
        write_atomically(given.output / HTML_NAME, render_html(names, reports, rows))
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


def compare(reports: Sequence[Report], patterns: Sequence[str]) -> dict[str, list[Difference]]:
    """Line up the figures that match a pattern and that two reports or more have."""
    names = dict.fromkeys(name for report in reports for name in report.figures)
    wanted = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return {
        name: [difference(reports[0].figures.get(name), report.figures.get(name)) for report in reports]
        for name in wanted
        if sum(name in report.figures for report in reports) > 1
    }


def difference(first: Measurement | None, other: Measurement | None) -> Difference:
    """Judge one figure against the first report's: noise if |b - a| <= sqrt(noise_a^2 + noise_b^2)."""
    if other is None:
        return Difference(None, None, None, "")
    if first is None or first is other:
        return Difference(other.value, other.noise, None, "", is_fraction=other.is_fraction)
    change = other.value / first.value - 1 if first.value else None
    delta = other.value - first.value
    verdict = "better" if (delta > 0) == (other.better == HIGHER) else "worse"
    if not delta:
        verdict = "equal"
    elif first.noise is None or other.noise is None or not other.better:
        verdict = ""
    elif abs(delta) <= math.hypot(first.noise, other.noise):
        verdict = "noise"
    return Difference(other.value, other.noise, change, verdict, delta, other.is_fraction)


def cell(figure: str, shown: Difference) -> tuple[str, str]:
    """One cell for people: value and interval, change and verdict; shares in percent and points."""
    if shown.value is None:
        return "", ""
    if shown.is_fraction:
        interval = "" if shown.noise is None else f" ±{100 * shown.noise:.2f}"
        value = f"{100 * shown.value:.2f}%"
        change = "" if shown.delta is None else f"{100 * shown.delta:+.2f} points"
    else:
        interval = "" if shown.noise is None else f" ±{show_figure(shown.noise)}"
        value = human_bytes(shown.value) if figure.endswith("_bytes") else show_figure(shown.value)
        change = "" if shown.change is None else f"{100 * shown.change:+.1f}%"
    return f"{value}{interval}", shown.verdict if shown.verdict == "equal" else f"{change} {shown.verdict}".strip()


def remarks(names: Sequence[str], reports: Sequence[Report]) -> list[str]:
    """What must be known before the figures are read."""
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
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    parts = ("value", "ci95", "change_percent", "verdict")
    writer.writerow(["figure", *(render(f"{name} {part}") for name in names for part in parts)])
    for figure, differences in rows.items():
        cells: list[object] = []
        for shown in differences:
            change = None if shown.change is None else 100 * shown.change
            cells += ["" if value is None else f"{value:.6g}" for value in (shown.value, shown.noise, change)]
            cells.append(shown.verdict)
        writer.writerow([render(figure), *map(render, cells)])
    return buffer.getvalue()


def render_markdown(names: Sequence[str], reports: Sequence[Report], rows: dict[str, list[Difference]]) -> str:
    """Render the same as a table for people."""
    said = "".join(f"- {remark}\n" for remark in remarks(names, reports))
    lines = [("Figure", *names), ("---", *("---:" for _ in names))]
    lines += [(figure, *("  ".join(cell(figure, shown)).strip() for shown in cells)) for figure, cells in rows.items()]
    table = "\n".join(f"| {' | '.join(text.replace('|', '/') for text in line)} |" for line in lines)
    return f"# Comparison\n\n{said}\n{table}\n"


def render_html(names: Sequence[str], reports: Sequence[Report], rows: dict[str, list[Difference]]) -> str:
    """Render the same as one self-contained page."""
    shown = [(figure, [(*cell(figure, each), each.verdict) for each in cells]) for figure, cells in rows.items()]
    return render_page(
        "compare.html",
        title="Comparison",
        summary=f"{len(rows)} figures of {len(names)} reports; changes are relative to {names[0]}.",
        remarks=remarks(names, reports),
        names=list(names),
        rows=shown,
    )


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
