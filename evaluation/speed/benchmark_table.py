"""The benchmark's table: one row a point, in a CSV that says what was measured on what."""

from __future__ import annotations

import csv
import dataclasses
import io
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.speed import metrics
from evaluation.speed.cells import has_columns, parse, render
from handover.durable import write_atomically

FILE_NAME = "benchmark.csv"
FIGURES = (
    *(f"latency_{which}_ms" for which in ("mean", "p50", "p90", "p95", "p99")),
    *("throughput_sequences_per_s", "throughput_tokens_per_s", "ci95_latency_mean_ms"),
    *("server_memory_peak_bytes", "gpu_utilisation_mean_percent", "gpu_memory_peak_bytes"),
    *("server_start_s", "server_load_s"),
)
"""Columns that hold figures."""
OK = "ok"
FAILED = "failed"


@dataclass(frozen=True)
class Row:
    """One point of the sweep; the columns of ``benchmark.csv``, in their order.

    Attributes:
        model: name of the served model.
        triton_model: Triton's name of the model that was asked.
        engine: ``slipway`` or ``fastertransformer``; empty for a server that is not ours.
        tensor_para_size, pipeline_para_size: parallelism, as text.
        weight_data_type, data_type: on disk and at run time.
        batch_size: sequences in a request.
        input_length, output_length: tokens of each sequence, given and generated.
        warmup: requests before the measured ones, not counted.
        repeats: measured requests, sent one after another.
        state: ``ok``, or ``failed`` with empty figures.
        latency_*_ms: milliseconds from sending a request to holding its answer; percentiles as in
            ``metrics.percentile``.
        throughput_sequences_per_s, throughput_tokens_per_s: as in ``metrics.throughput``; generated
            tokens only.
        ci95_latency_mean_ms: half of the 95% confidence interval of the mean latency.
        server_*, gpu_*: as in ``costs.COST_FIGURES``; None where this host does not show it.
        errors: failed requests; the first ends the point.
        error: the reason.
        model_digest: digest of the model repository's manifest.
        commit: of the code that measured.
        int8_mode: as config.pbtxt has it; empty where unknown.
        versions: of the programs that served, as ``handover.endpoint.VERSIONS``.
        cpu, cores, memory_bytes, gpu: of the client's host.
        timestamp: when the point was finished, UTC.
        is_random_weights: the weights are made up: the figures say nothing about accuracy.
        settings_fingerprint: what must agree for a killed run to keep this row.
    """

    model: str
    triton_model: str
    engine: str
    tensor_para_size: str
    pipeline_para_size: str
    weight_data_type: str
    data_type: str
    batch_size: int
    input_length: int
    output_length: int
    warmup: int
    repeats: int
    state: str
    latency_mean_ms: float | None = None
    latency_p50_ms: float | None = None
    latency_p90_ms: float | None = None
    latency_p95_ms: float | None = None
    latency_p99_ms: float | None = None
    throughput_sequences_per_s: float | None = None
    throughput_tokens_per_s: float | None = None
    ci95_latency_mean_ms: float | None = None
    server_memory_peak_bytes: float | None = None
    gpu_utilisation_mean_percent: float | None = None
    gpu_memory_peak_bytes: float | None = None
    server_start_s: float | None = None
    server_load_s: float | None = None
    errors: int = 0
    error: str = ""
    model_digest: str = ""
    commit: str = ""
    int8_mode: str = ""
    versions: str = ""
    cpu: str = ""
    cores: int | None = None
    memory_bytes: int | None = None
    gpu: str = ""
    timestamp: str = ""
    is_random_weights: bool = False
    settings_fingerprint: str = ""

    @property
    def point(self) -> tuple[int, int, int]:
        """Batch size, input length and output length: what tells the rows of one sweep apart."""
        return self.batch_size, self.input_length, self.output_length

    def with_latencies(self, latencies_ns: Sequence[int]) -> Row:
        """Fill in the figures of a point whose requests all succeeded.

        Args:
            latencies_ns: of the measured requests, in nanoseconds.
        """
        latencies_ms = [latency / metrics.NANOSECONDS_PER_MS for latency in latencies_ns]
        return dataclasses.replace(
            self,
            state=OK,
            latency_mean_ms=metrics.mean(latencies_ms),
            latency_p50_ms=metrics.percentile(latencies_ms, 50),
            latency_p90_ms=metrics.percentile(latencies_ms, 90),
            latency_p95_ms=metrics.percentile(latencies_ms, 95),
            latency_p99_ms=metrics.percentile(latencies_ms, 99),
            throughput_sequences_per_s=metrics.throughput(self.batch_size, latencies_ns),
            throughput_tokens_per_s=metrics.throughput(self.batch_size * self.output_length, latencies_ns),
            ci95_latency_mean_ms=metrics.half_width(latencies_ms),
        )

    def with_costs(self, figures: Mapping[str, float | None]) -> Row:
        """Fill in what the deployment cost, for a point that was measured."""
        if self.state != OK:
            return self
        columns = {column.name for column in dataclasses.fields(self)}
        known: dict[str, Any] = {name: value for name, value in figures.items() if name in columns}
        return dataclasses.replace(self, **known)


ANCESTORS_COLUMNS = (
    *("Batch Size", "Tensor Parallel", "Pipeline Parallel", "Input length", "Output length"),
    *("FT latency (ms)", "Throughput per GPU (sentence/s)"),
)
"""Columns of NeMo-Megatron-Launcher's and FasterTransformer's tables, at the end of ours, for those who read them."""


def ancestors_cells(row: Row) -> tuple[object, ...]:
    """One row under ANCESTORS_COLUMNS: mean latency, and sequences per second divided by TP x PP."""
    per_gpu = None
    if row.throughput_sequences_per_s is not None:
        # From the digits that the table holds: who reads it and divides finds the same.
        per_gpu = float(render(row.throughput_sequences_per_s)) / (
            int(row.tensor_para_size or 1) * int(row.pipeline_para_size or 1)
        )
    parallel = (row.tensor_para_size, row.pipeline_para_size)
    return row.batch_size, *parallel, row.input_length, row.output_length, row.latency_mean_ms, per_gpu


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write the table atomically; a missing value is an empty cell."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*(column.name for column in dataclasses.fields(Row)), *ANCESTORS_COLUMNS])
    for row in rows:
        writer.writerow([render(value) for value in (*dataclasses.astuple(row), *ancestors_cells(row))])
    write_atomically(path, buffer.getvalue())


def read_rows(path: Path) -> list[Row]:
    """Read what ``write_rows`` wrote.

    Raises:
        ValueError: the file is not such a table.
    """
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        names = [column.name for column in dataclasses.fields(Row)]
        if not has_columns(reader.fieldnames, [*names, *ANCESTORS_COLUMNS]):
            raise ValueError(f"{path} does not have the columns of a benchmark")
        return [_row({name: cells[name] for name in names if name in cells}) for cells in reader]


def _row(cells: dict[str, str]) -> Row:
    hints = typing.get_type_hints(Row)
    return Row(**{name: parse(cell, hints[name]) for name, cell in cells.items()})
