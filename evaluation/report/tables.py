"""The report's tables and sentences about benchmarks, the same on the terminal, in Markdown and in HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from evaluation.report.benchmarks import Benchmark
from evaluation.report.formatting import TextTable, show_figure, show_with_noise
from evaluation.speed.tables.costs import COST_FIGURES
from evaluation.speed.tables.figures import DISTRIBUTIONS, PERCENTILES, STATISTICS
from evaluation.speed.tables.table import OK, Row
from handover.progress import human_bytes

LOAD = "Load"


_Cell = Callable[[Row], str]
_Columns = Sequence[tuple[str, _Cell]]


def _figure(name: str) -> _Cell:
    return lambda row: show_figure(row.figures.get(name))


def _with_interval(row: Row) -> str:
    return show_with_noise(row.figures.get("output_tokens_per_s"), row.figures.get("ci95_output_tokens_per_s"))


def _bytes(name: str) -> _Cell:
    return lambda row: "" if (value := row.figures.get(name)) is None else human_bytes(value)


_FAILED: tuple[str, _Cell] = (
    "Failed",
    lambda row: f"{row.failed_requests} of {row.requests}" if row.failed_requests else "0",
)
_BATCH: tuple[str, _Cell] = ("Batch size", lambda row: str(row.batch_size))
_LOAD: tuple[str, _Cell] = (LOAD, lambda row: row.label)
_LATENCY_COLUMNS = ("Mean, ms", *(f"p{percent}, ms" for percent in PERCENTILES))
_STATIC_COLUMNS: _Columns = (
    *zip(_LATENCY_COLUMNS, (_figure(f"e2e_{statistic}_ms") for statistic in STATISTICS), strict=True),
    ("Sequences/s", _figure("sequences_per_s")),
    ("Tokens/s", _figure("output_tokens_per_s")),
)
_THROUGHPUT_COLUMNS: _Columns = (
    ("Requests/s", _figure("requests_per_s")),
    ("Output tokens/s", _with_interval),
    ("Tokens/s/user", _figure("output_tokens_per_s_per_user")),
    ("Goodput, requests/s", _figure("goodput_requests_per_s")),
    _FAILED,
)
_BRIEF_COLUMNS: _Columns = (
    ("Requests/s", _figure("requests_per_s")),
    ("Tokens/s", _with_interval),
    ("TTFT p50, ms", _figure("ttft_p50_ms")),
    ("TPOT p50, ms", _figure("tpot_p50_ms")),
    ("E2E p50, ms", _figure("e2e_p50_ms")),
    ("E2E p99, ms", _figure("e2e_p99_ms")),
    ("Goodput, requests/s", _figure("goodput_requests_per_s")),
    _FAILED,
)
_SERVER_COLUMNS: _Columns = (
    ("Queue, ms", _figure("server_queue_mean_ms")),
    ("Compute, ms", _figure("server_compute_mean_ms")),
    ("Total, ms", _figure("server_request_mean_ms")),
    ("Mean batch", _figure("server_mean_batch")),
    ("Client p50, ms", _figure("client_queue_p50_ms")),
    ("Client p99, ms", _figure("client_queue_p99_ms")),
)
_PRICE_COLUMNS: _Columns = (
    ("Cost of 1M tokens", _figure("cost_per_million_tokens")),
    ("Of 1M output tokens", _figure("cost_per_million_output_tokens")),
    ("Energy of an output token, J", _figure("gpu_energy_per_output_token_j")),
)
_COST_COLUMNS: _Columns = (
    ("Memory peak", _bytes("server_memory_peak_bytes")),
    ("Server, cores", _figure("server_cpu_cores")),
    ("Client, cores", _figure("client_cpu_cores")),
    ("GPU use, %", _figure("gpu_utilisation_mean_percent")),
    ("GPU memory peak", _bytes("gpu_memory_peak_bytes")),
    *_PRICE_COLUMNS,
)
_LISTS = ((_BATCH,), _STATIC_COLUMNS, _THROUGHPUT_COLUMNS, _SERVER_COLUMNS, _COST_COLUMNS)
NUMERIC = frozenset(name for columns in _LISTS for name, _ in columns)
"""Names of columns that hold numbers."""


def benchmark_tables(benchmark: Benchmark, rows: Sequence[Row]) -> list[TextTable]:
    """Make the tables of a benchmark for each pair of lengths: one of a static sweep, four of a load.

    Columns of a load without any figure are left out.

    Args:
        benchmark: the benchmark of the tables.
        rows: rows of the benchmark; those without figures show their error.
    """
    if not benchmark.is_load:
        return [
            _table(f"{lengths_label(points[0])} (tokens of each sequence)", _BATCH, _static_columns(points), points)
            for points in group_by_workload(rows).values()
        ]
    tables = []
    for workload, points in group_by_workload(rows).items():
        tables.append(_known_table(f"{workload} tokens (in/out): throughput", _THROUGHPUT_COLUMNS, points))
        measured = [row for row in points if row.state == OK]
        if measured:
            tables.append(_latency_table(measured))
            note = "; Triton counts until a decoupled model takes the request" if measured[0].is_streaming else ""
            caption = f"In the server, and the wait in the client before it{note}"
            tables.append(_known_table(caption, _SERVER_COLUMNS, measured))
            tables.append(_known_table(_cost_caption(measured), _COST_COLUMNS, measured))
    return [table for table in tables if len(table.columns) > 1]


def brief_tables(benchmark: Benchmark) -> list[TextTable]:
    """Make one narrow table for each pair of lengths, for a terminal."""
    groups = group_by_workload(benchmark.measured)
    if benchmark.is_load:
        return [_known_table(f"{name} tokens (in/out)", _BRIEF_COLUMNS, points) for name, points in groups.items()]
    return [
        _table(f"{lengths_label(points[0])} (tokens)", _BATCH, _STATIC_COLUMNS, points) for points in groups.values()
    ]


def failed_points(benchmark: Benchmark) -> list[str]:
    """Describe the failed points; batches of the same lengths that failed for one reason share a line."""
    if benchmark.is_load:
        return [f"{row.label}, {row.workload} tokens: {row.error}" for row in benchmark.failed]
    sizes: dict[tuple[str, str], list[str]] = {}
    for row in benchmark.failed:
        sizes.setdefault((lengths_label(row), row.error), []).append(str(row.batch_size))
    return [f"batch {', '.join(batch_sizes)}, {lengths}: {error}" for (lengths, error), batch_sizes in sizes.items()]


def speed_sentences(benchmarks: Sequence[Benchmark]) -> list[str]:
    """Return a sentence about all static sweeps, and one about each load."""
    static = [row for benchmark in benchmarks if not benchmark.is_load for row in benchmark.measured]
    loads = [_load_sentence(benchmark.rows) for benchmark in benchmarks if benchmark.is_load]
    return [sentence for sentence in (_static_sentence(static), *loads) if sentence]


def group_by_workload(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group rows by their lengths, in their order; static ones each by batch size."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.workload, []).append(row)
    return {workload: sorted(group, key=lambda row: row.batch_size) for workload, group in groups.items()}


def lengths_label(row: Row) -> str:
    """Return the lengths of a static point: ``60 in, 20 out``."""
    return f"{row.input_length} in, {row.output_length} out"


def _table(caption: str, name: tuple[str, _Cell], columns: _Columns, rows: Sequence[Row]) -> TextTable:
    cells = tuple((name[1](row), *(cell(row) if row.state == OK else "" for _, cell in columns)) for row in rows)
    errors = tuple("" if row.state == OK else row.error or "no figures" for row in rows)
    return TextTable(caption, (name[0], *(title for title, _ in columns)), cells, errors)


def _known_table(caption: str, columns: _Columns, rows: Sequence[Row]) -> TextTable:
    """Make the table of a load from the columns that have a figure in any row."""
    return _table(caption, _LOAD, _known(columns, rows), rows)


def _static_columns(rows: Sequence[Row]) -> _Columns:
    """Return the columns of a static sweep; those of costs only where a row has one."""
    return (*_STATIC_COLUMNS, *_known(_PRICE_COLUMNS, rows))


def _known(columns: _Columns, rows: Sequence[Row]) -> _Columns:
    return [(name, cell) for name, cell in columns if any(row.state == OK and cell(row) for row in rows)]


def _latency_table(rows: Sequence[Row]) -> TextTable:
    cells = [
        (row.label, distribution.title, *(show_figure(row.figures.get(name)) for name in distribution.columns()))
        for row in rows
        for distribution in DISTRIBUTIONS
        if distribution.name != "client_queue" and row.figures.get(distribution.columns()[0]) is not None
    ]
    return TextTable("Latency", (LOAD, "Of a request", *_LATENCY_COLUMNS), tuple(cells), ("",) * len(cells))


def _cost_caption(rows: Sequence[Row]) -> str:
    figures = {name: rows[-1].figures.get(name) for name in COST_FIGURES}
    parts = [
        f"{show_figure(figures[name])} s to {text}"
        for name, text in (("server_start_s", "the first generation"), ("server_load_s", "load the model"))
        if figures[name] is not None
    ]
    return "What it costs" + (f" ({', '.join(parts)})" if parts else "")


def _static_sentence(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    first = min(rows, key=lambda row: (row.batch_size, row.input_length, row.output_length))
    fastest = max(rows, key=lambda row: row.figures.get("output_tokens_per_s") or 0.0)

    def point(row: Row) -> str:
        return f"{row.label}, {lengths_label(row)}"

    return (
        f"A request takes {show_figure(first.figures.get('e2e_mean_ms'))} ms ({point(first)}); the highest throughput "
        f"is {show_figure(fastest.figures.get('output_tokens_per_s'))} tokens/s ({point(fastest)})."
    )


def _load_sentence(rows: Sequence[Row]) -> str:
    known = [row for row in rows if row.figures.get("output_tokens_per_s") is not None]
    if not known:
        return ""
    valid = [row for row in known if not row.validity_reasons]
    best = max(valid or known, key=lambda row: row.figures["output_tokens_per_s"] or 0.0)
    doubt = "" if valid else f"; no point is VALID, this one: {best.validity_reasons}"
    latency = show_figure(best.figures.get("e2e_p50_ms"))
    sentence = (
        f"Under load it generates up to {show_figure(best.figures['output_tokens_per_s'])} tokens/s "
        f"({best.label}, {best.workload} tokens, where a request takes {latency} ms{doubt})"
    )
    ttft = best.figures.get("ttft_p50_ms")
    return sentence + (f"; the first token is there after {show_figure(ttft)} ms." if ttft is not None else ".")
