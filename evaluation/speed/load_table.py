"""The load generator's table: one row a point, in a CSV with the units in the names."""

from __future__ import annotations

import csv
import dataclasses
import io
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.speed.cells import has_columns, parse, render
from evaluation.speed.costs import COST_FIGURES
from evaluation.speed.load_figures import FIGURE_COLUMNS
from evaluation.speed.server_metrics import SERVER_FIGURES
from handover.durable import write_atomically

FILE_NAME = "load.csv"
SUMMARY = "summary.json"
OK = "ok"
FAILED = "failed"
CLOSED, OPEN = "closed", "open"
FIGURES = (*FIGURE_COLUMNS, *SERVER_FIGURES, *COST_FIGURES)


@dataclass(frozen=True)
class LoadRow:
    """One point; the columns of ``load.csv`` are these fields, with FIGURES in place of ``figures``.

    Attributes:
        model: name of the served model.
        triton_model: Triton's name of the model that was asked.
        engine: ``slipway`` or ``fastertransformer``; empty for a server that is not ours.
        tensor_para_size, pipeline_para_size: parallelism, as text.
        weight_data_type, data_type: on disk and at run time.
        max_batch_size: rows that the served model takes at once.
        max_queue_delay_us: of its dynamic batcher; None without one.
        workload: lengths as ``60/20``, or the name of the prompt file.
        mode: ``closed`` or ``open``.
        concurrency: requests in flight, closed loop only.
        request_rate_per_s: open loop only.
        arrival: poisson or constant, open loop only.
        is_streaming: whether answers were streamed.
        requests, failed_requests: counted answers, and those among them that failed.
        warmup_requests: answers before them.
        repeats: windows of equal size that ``requests`` were cut into.
        is_stable: whether the repeats agreed as closely as asked for.
        duration_s: of all repeats.
        state: ``ok``, or ``failed`` with empty figures where no request succeeded.
        error: the reason, or that of the first failed request.
        figures: by FIGURES; None for what cannot be computed.
        model_digest: digest of the model repository's manifest.
        is_random_weights: True where that manifest says so.
        commit: of the code that measured.
        int8_mode: as config.pbtxt has it; empty where unknown.
        versions: of the programs that served, as ``handover.endpoint.VERSIONS``.
        cpu, cores, memory_bytes, gpu: of the client's host.
        timestamp: when the point was finished, UTC.
        settings_fingerprint: what must agree for a killed run to keep this row.
    """

    model: str
    triton_model: str
    engine: str
    tensor_para_size: str
    pipeline_para_size: str
    weight_data_type: str
    data_type: str
    max_batch_size: int | None
    max_queue_delay_us: int | None
    workload: str
    mode: str
    concurrency: int | None
    request_rate_per_s: float | None
    arrival: str
    is_streaming: bool
    requests: int = 0
    failed_requests: int = 0
    warmup_requests: int = 0
    repeats: int = 0
    is_stable: bool = False
    duration_s: float | None = None
    state: str = FAILED
    error: str = ""
    figures: Mapping[str, float | None] = field(default_factory=dict)
    model_digest: str = ""
    is_random_weights: bool = False
    commit: str = ""
    int8_mode: str = ""
    versions: str = ""
    cpu: str = ""
    cores: int | None = None
    memory_bytes: int | None = None
    gpu: str = ""
    timestamp: str = ""
    settings_fingerprint: str = ""

    @property
    def point(self) -> tuple[str, str, float]:
        """What tells the rows of one sweep apart."""
        return self.workload, self.mode, self.level

    @property
    def level(self) -> float:
        """Concurrency or request rate."""
        return float((self.concurrency if self.mode == CLOSED else self.request_rate_per_s) or 0)

    @property
    def label(self) -> str:
        """Name the load for people: ``concurrency 4``, ``8 requests/s``."""
        return f"concurrency {self.concurrency}" if self.mode == CLOSED else f"{self.level:g} requests/s"

    @property
    def directory(self) -> str:
        """Name of the point's directory."""
        load = f"concurrency{self.concurrency}" if self.mode == CLOSED else f"rate{self.level:g}"
        plain = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in self.workload)
        return f"{plain}_{load}"


def write_rows(path: Path, rows: Iterable[LoadRow]) -> None:
    """Write the table atomically; a missing value is an empty cell."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns(), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: render(value) for name, value in flatten(row).items()} for row in rows)
    write_atomically(path, buffer.getvalue())


def columns() -> list[str]:
    """Names of all columns, in their order."""
    names: list[str] = []
    for column in dataclasses.fields(LoadRow):
        names += FIGURES if column.name == "figures" else [column.name]
    return names


def flatten(row: LoadRow) -> dict[str, Any]:
    """One dictionary by column."""
    content = {column.name: getattr(row, column.name) for column in dataclasses.fields(row)}
    figures = content.pop("figures")
    content |= {name: figures.get(name) for name in FIGURES}
    return {name: content[name] for name in columns()}


def read_rows(path: Path) -> list[LoadRow]:
    """Read what ``write_rows`` wrote.

    Raises:
        ValueError: the file is not such a table.
    """
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        if not has_columns(reader.fieldnames, columns()):
            raise ValueError(f"{path} does not have the columns of a load sweep")
        return [_row(cells) for cells in reader]


def _row(cells: dict[str, str]) -> LoadRow:
    hints = typing.get_type_hints(LoadRow)
    figures = {name: None if cells[name] == "" else float(cells[name]) for name in FIGURES}
    fields = {name: parse(cell, hints[name]) for name, cell in cells.items() if name not in figures}
    return LoadRow(figures=figures, **fields)
