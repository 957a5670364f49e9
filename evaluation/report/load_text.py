"""The report's tables and sentences about a load, the same on the terminal, in Markdown and in HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from evaluation.report.number_text import show_figure, show_with_noise
from evaluation.speed.costs import COST_FIGURES
from evaluation.speed.load_figures import DISTRIBUTIONS, PERCENTILES
from evaluation.speed.load_table import OK, LoadRow
from handover.progress import human_bytes

LOAD = "Load"


@dataclass(frozen=True)
class Table:
    """A table for people.

    Attributes:
        caption: above it.
        columns: the first is the rows' name, the others hold numbers.
        rows: cells as text; what is missing is empty.
        errors: one a row; not empty where it has no figures.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    errors: tuple[str, ...] = ()


_Cell = Callable[[LoadRow], str]


def _figure(name: str) -> _Cell:
    return lambda row: show_figure(row.figures.get(name))


def _with_interval(row: LoadRow) -> str:
    return show_with_noise(row.figures.get("output_tokens_per_s"), row.figures.get("ci95_output_tokens_per_s"))


def _bytes(name: str) -> _Cell:
    return lambda row: "" if (value := row.figures.get(name)) is None else human_bytes(value)


_FAILED: tuple[str, _Cell] = (
    "Failed",
    lambda row: f"{row.failed_requests} of {row.requests}" if row.failed_requests else "0",
)
_THROUGHPUT_COLUMNS: tuple[tuple[str, _Cell], ...] = (
    ("Requests/s", _figure("requests_per_s")),
    ("Output tokens/s", _with_interval),
    ("Tokens/s/user", _figure("output_tokens_per_s_per_user")),
    ("Goodput, requests/s", _figure("goodput_requests_per_s")),
    _FAILED,
)
_BRIEF_COLUMNS: tuple[tuple[str, _Cell], ...] = (
    ("Requests/s", _figure("requests_per_s")),
    ("Tokens/s", _with_interval),
    ("TTFT p50, ms", _figure("ttft_p50_ms")),
    ("TPOT p50, ms", _figure("tpot_p50_ms")),
    ("E2E p50, ms", _figure("e2e_p50_ms")),
    ("E2E p99, ms", _figure("e2e_p99_ms")),
    _FAILED,
)
_LATENCY_COLUMNS = ("Mean, ms", *(f"p{percent}, ms" for percent in PERCENTILES))
_SERVER_COLUMNS: tuple[tuple[str, _Cell], ...] = (
    ("Queue, ms", _figure("server_queue_mean_ms")),
    ("Compute, ms", _figure("server_compute_mean_ms")),
    ("Total, ms", _figure("server_request_mean_ms")),
    ("Mean batch", _figure("server_mean_batch")),
    ("Client p50, ms", _figure("client_queue_p50_ms")),
    ("Client p99, ms", _figure("client_queue_p99_ms")),
)
_COST_COLUMNS: tuple[tuple[str, _Cell], ...] = (
    ("Memory peak", _bytes("server_memory_peak_bytes")),
    ("Server, cores", _figure("server_cpu_cores")),
    ("Client, cores", _figure("client_cpu_cores")),
    ("GPU use, %", _figure("gpu_utilisation_mean_percent")),
    ("GPU memory peak", _bytes("gpu_memory_peak_bytes")),
)
_LISTS = (_THROUGHPUT_COLUMNS, _SERVER_COLUMNS, _COST_COLUMNS)
NUMERIC = frozenset((*(name for columns in _LISTS for name, _ in columns), *_LATENCY_COLUMNS))
"""Names of columns that hold numbers."""


def load_tables(rows: Sequence[LoadRow]) -> list[Table]:
    """Make the tables of a sweep, four for each pair of lengths; a column without any figure is left out."""
    tables = []
    for workload, points in group_by_workload(rows).items():
        tables.append(_table(f"{workload} tokens (in/out): throughput", _THROUGHPUT_COLUMNS, points))
        measured = [row for row in points if row.state == OK]
        if measured:
            tables.append(_latency_table(measured))
            note = "; Triton counts until a decoupled model takes the request" if measured[0].is_streaming else ""
            tables.append(
                _table(f"In the server, and the wait in the client before it{note}", _SERVER_COLUMNS, measured)
            )
            tables.append(_table(_cost_caption(measured), _COST_COLUMNS, measured))
    return [table for table in tables if len(table.columns) > 1]


def brief_tables(rows: Sequence[LoadRow]) -> list[Table]:
    """Make one narrow table for each pair of lengths, for a terminal."""
    groups = group_by_workload(rows).items()
    return [_table(f"{workload} tokens (in/out)", _BRIEF_COLUMNS, points) for workload, points in groups]


def _latency_table(rows: Sequence[LoadRow]) -> Table:
    cells = [
        (row.label, distribution.title, *(show_figure(row.figures.get(name)) for name in distribution.columns()))
        for row in rows
        for distribution in DISTRIBUTIONS
        if distribution.name != "client_queue" and row.figures.get(distribution.columns()[0]) is not None
    ]
    return Table("Latency", (LOAD, "Of a request", *_LATENCY_COLUMNS), tuple(cells), ("",) * len(cells))


def group_by_workload(rows: Iterable[LoadRow]) -> dict[str, list[LoadRow]]:
    """Group rows by their lengths, in their order."""
    groups: dict[str, list[LoadRow]] = {}
    for row in rows:
        groups.setdefault(row.workload, []).append(row)
    return groups


def load_sentence(rows: Sequence[LoadRow]) -> str:
    """Say in one sentence what the deployment sustains; nothing if it was not measured."""
    known = [row for row in rows if row.figures.get("output_tokens_per_s") is not None]
    if not known:
        return ""
    best = max(known, key=lambda row: row.figures["output_tokens_per_s"] or 0.0)
    latency = show_figure(best.figures.get("e2e_p50_ms"))
    sentence = (
        f"Under load it generates up to {show_figure(best.figures['output_tokens_per_s'])} tokens/s "
        f"({best.label}, {best.workload} tokens, where a request takes {latency} ms)"
    )
    ttft = best.figures.get("ttft_p50_ms")
    return sentence + (f"; the first token is there after {show_figure(ttft)} ms." if ttft is not None else ".")


def failed_load_points(rows: Iterable[LoadRow]) -> list[str]:
    """One line for each failed point."""
    return [f"{row.label}, {row.workload} tokens: {row.error}" for row in rows]


def _table(caption: str, columns: Sequence[tuple[str, _Cell]], rows: Sequence[LoadRow]) -> Table:
    shown = [(name, cell) for name, cell in columns if any(row.state == OK and cell(row) for row in rows)]
    cells = tuple((row.label, *(cell(row) if row.state == OK else "" for _, cell in shown)) for row in rows)
    errors = tuple("" if row.state == OK else row.error or "no figures" for row in rows)
    return Table(caption, (LOAD, *(name for name, _ in shown)), cells, errors)


def _cost_caption(rows: Sequence[LoadRow]) -> str:
    figures = {name: rows[-1].figures.get(name) for name in COST_FIGURES}
    parts = [
        f"{show_figure(figures[name])} s to {text}"
        for name, text in (("server_start_s", "the first generation"), ("server_load_s", "load the model"))
        if figures[name] is not None
    ]
    return "What it costs" + (f" ({', '.join(parts)})" if parts else "")
