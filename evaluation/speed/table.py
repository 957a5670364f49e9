"""The tables of measured points: one row type, and the columns that each of the two CSV files shows of it."""

from __future__ import annotations

import csv
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.speed.backlog import BACKLOG_FIGURES
from evaluation.speed.cells import csv_text, name_of_file, parse, render
from evaluation.speed.costs import COST_FIGURES, ENERGY_FIGURES
from evaluation.speed.figures import FIGURE_COLUMNS, STATISTICS
from evaluation.speed.server_metrics import SERVER_FIGURES
from handover.durable import write_atomically

SUMMARY = "summary.json"
DERIVED_FIGURES = {
    "cost_per_million_tokens": "gpu_hour_price x GPUs / 3600 / total_tokens_per_s x 1,000,000; empty without a price",
    "cost_per_million_output_tokens": "gpu_hour_price x GPUs / 3600 / output_tokens_per_s x 1,000,000; empty without a "
    "price",
    "gpu_energy_per_output_token_j": "gpu_power_mean_watts / output_tokens_per_s",
}
"""Figures that ``derived`` computes from others of a row, with their formulas."""
SLO_FIGURES = {
    "slo_kept_share": "share of requests within the limit that the fewest keep",
    "slo_kept_low": "lower end of the 99% interval of that share",
    "slo_kept_high": "upper end of it",
}
"""Figures of a rate that a search for the highest one measured; empty for other points."""
_WORKLOAD_COLUMNS = ("clipped_share", "cancelled_requests", "server_idle_s", "remark", "slo_verdict", "slo_limit")
_ENGINE_COLUMNS = ("flags", "gpu_hour_price", *ENERGY_FIGURES, *DERIVED_FIGURES, "endpoint_kind")
NEWER_COLUMNS = ("int8_mode", "versions", *_ENGINE_COLUMNS, *_WORKLOAD_COLUMNS, *SLO_FIGURES, *BACKLOG_FIGURES)
"""Columns that tables of earlier versions do not have; such tables are still read. A new column is added here."""
OK, FAILED = "ok", "failed"
TRITON, OPENAI = "triton", "openai"
"""Kinds of an endpoint: Triton's gRPC, and an OpenAI API."""
STATIC, CLOSED, OPEN = "static", "closed", "open"
"""Modes of a point: batches sent one after another, a constant number of requests in flight, a rate of requests."""


@dataclass(frozen=True)
class Row:
    """One measured point.

    A static point is a closed loop with one request in flight, of ``batch_size`` sequences; each of its measured
    requests is a repeat.

    Attributes:
        model: name of the served model.
        triton_model: Triton's name of the model that was asked.
        engine: ``slipway`` or ``fastertransformer``; empty for a server that is not ours.
        tensor_para_size, pipeline_para_size: parallelism, as text.
        weight_data_type, data_type: on disk and at run time.
        workload: lengths in tokens as ``60/20``, or the name of the prompt file.
        mode: ``static``, ``closed`` or ``open``.
        batch_size: sequences in one request.
        concurrency: requests in flight, closed loop only.
        request_rate_per_s: open loop only.
        arrival: poisson or constant, open loop only.
        is_streaming: whether answers were streamed.
        max_batch_size: rows that the served model takes at once; None where it was not asked.
        max_queue_delay_us: of its dynamic batcher; None without one.
        warmup_requests: answers before the measured ones.
        requests, failed_requests: measured answers of a load, and failures among all.
        cancelled_requests: measured requests whose client hung up, which are in no other figure; None without hang-ups.
        clipped_share: share of the prepared requests of a load that were made shorter to fit the model's positions.
        remark: what a reader must know of the load, such as that it is no MLPerf result.
        slo_verdict: of a search: ``holds``, ``exceeded`` or ``undecided``.
        slo_limit: the limit that the fewest requests keep; ``backlog`` where answers do not keep up with arrivals.
        repeats: windows of equal size that the measured answers were cut into.
        is_stable: whether the repeats of a load agreed as closely as asked for.
        duration_s: of all repeats of a load.
        state: ``ok``, or ``failed`` with empty figures.
        error: the reason, or that of the first failed request.
        figures: by name, as ``figures``, ``server_metrics`` and ``costs`` define them; None for what cannot be
            computed.
        model_digest: digest of the model repository's manifest.
        is_random_weights: whether that manifest says that the weights are random.
        commit: of the code that measured.
        int8_mode: as config.pbtxt has it; empty where unknown.
        versions: of the programs that served, as ``handover.endpoint.VERSIONS``.
        cpu, cores, memory_bytes, gpu: of the client's host.
        timestamp: when the point was finished, UTC.
        settings_fingerprint: digest of the settings; a resumed run keeps only rows that have the same.
        endpoint_kind: ``triton`` or ``openai``; empty in tables of earlier versions.
        flags: of the engine, as its command line or its settings name them; empty where unknown.
        gpu_hour_price: of one GPU for an hour, in any currency; None where costs are not asked for.
    """

    model: str = ""
    triton_model: str = ""
    engine: str = ""
    tensor_para_size: str = ""
    pipeline_para_size: str = ""
    weight_data_type: str = ""
    data_type: str = ""
    workload: str = ""
    mode: str = STATIC
    batch_size: int = 1
    concurrency: int | None = None
    request_rate_per_s: float | None = None
    arrival: str = ""
    is_streaming: bool = False
    max_batch_size: int | None = None
    max_queue_delay_us: int | None = None
    warmup_requests: int = 0
    requests: int = 0
    failed_requests: int = 0
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
    flags: str = ""
    endpoint_kind: str = ""
    gpu_hour_price: float | None = None
    clipped_share: float | None = None
    cancelled_requests: int | None = None
    remark: str = ""
    slo_verdict: str = ""
    slo_limit: str = ""

    @property
    def point(self) -> tuple[str, str, float]:
        """What distinguishes the rows of one sweep."""
        return self.workload, self.mode, self.level

    @property
    def level(self) -> float:
        """Batch size, concurrency or request rate."""
        levels = {STATIC: self.batch_size, CLOSED: self.concurrency}
        return float(levels.get(self.mode, self.request_rate_per_s) or 0)

    @property
    def label(self) -> str:
        """Name of the level for people: ``batch 8``, ``concurrency 4``, ``8 requests/s``."""
        labels = {STATIC: f"batch {self.batch_size}", CLOSED: f"concurrency {self.concurrency}"}
        return labels.get(self.mode) or f"{self.level:g} requests/s"

    @property
    def directory(self) -> str:
        """Name of the point in file names and in names of figures."""
        levels = {STATIC: f"batch{self.batch_size}", CLOSED: f"concurrency{self.concurrency}"}
        return f"{name_of_file(self.workload)}_{levels.get(self.mode) or f'rate{self.level:g}'}"

    @property
    def input_length(self) -> int:
        """Tokens of each prompt of a static point."""
        return int(self.workload.partition("/")[0])

    @property
    def output_length(self) -> int:
        """Tokens generated for each prompt of a static point."""
        return int(self.workload.partition("/")[2])

    @property
    def ranks(self) -> int:
        """Ranks of the deployment: TP x PP."""
        return int(self.tensor_para_size or 1) * int(self.pipeline_para_size or 1)

    @property
    def gpus(self) -> int | None:
        """GPUs of the deployment; 1 for one on the CPU; None for an OpenAI API, which does not tell."""
        if self.endpoint_kind == OPENAI and not self.tensor_para_size:
            return None
        return self.ranks if self.gpu else 1

    @property
    def sequences_per_s_per_rank(self) -> float | None:
        """Throughput divided by TP x PP, from the digits that the table shows of it: who divides finds the same."""
        throughput = self.figures.get("sequences_per_s")
        return None if throughput is None else float(render(throughput)) / self.ranks

    @property
    def is_measured(self) -> bool:
        """Whether the row has figures."""
        return self.state == OK and (self.mode != STATIC or self.figures.get("e2e_mean_ms") is not None)

    def value(self, name: str) -> Any:
        """One field, property or figure by its name; None for a figure that is missing."""
        return getattr(self, name) if hasattr(self, name) else self.figures.get(name)


_FIELDS = typing.get_type_hints(Row)


@dataclass(frozen=True)
class Table:
    """The shape of one CSV file.

    Attributes:
        content: what it holds, for messages.
        file_name: of the file.
        columns: name of the row's field or figure by column, in order.
        aliases: further columns at the end, which repeat others under names that users of other tools know.
    """

    content: str
    file_name: str
    columns: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, str]:
        """The columns that hold figures, with the figures' names in rows."""
        return {column: name for column, name in self.columns.items() if not hasattr(Row, name) and name not in _FIELDS}

    def write(self, path: Path, rows: Iterable[Row]) -> None:
        """Write the table atomically; a missing value is an empty cell."""
        columns = [*self.columns.items(), *self.aliases.items()]
        heads = [column for column, _ in columns]
        write_atomically(path, csv_text([heads, *([row.value(name) for _, name in columns] for row in rows)]))

    def read(self, path: Path) -> list[Row]:
        """Read what ``write`` wrote, also of an earlier version, whose tables do not have all of NEWER_COLUMNS.

        Raises:
            ValueError: the file is not such a table.
        """
        expected = [*self.columns, *self.aliases]
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            found = list(reader.fieldnames or ())
            if found != [column for column in expected if column in found or column not in NEWER_COLUMNS]:
                raise ValueError(f"{path} does not have the columns of a {self.content}")
            return [self._row(cells) for cells in reader]

    def _row(self, cells: Mapping[str, str]) -> Row:
        given = {name: cells[column] for column, name in self.columns.items() if column in cells}
        if "input_length" in given:
            given["workload"] = f"{int(given['input_length'])}/{int(given['output_length'])}"
        fields: dict[str, Any] = {name: parse(cell, _FIELDS[name]) for name, cell in given.items() if name in _FIELDS}
        figures = {name: float(given[name]) if given.get(name) else None for name in self.figures.values()}
        return Row(**fields, figures=figures)


def _same(*names: str) -> dict[str, str]:
    """Columns that are called like their fields."""
    return {name: name for name in names}


_DEPLOYMENT = (
    *("model", "triton_model", "engine", "tensor_para_size", "pipeline_para_size"),
    *("weight_data_type", "data_type"),
)
_HOST = ("int8_mode", "versions", "cpu", "cores", "memory_bytes", "gpu", "timestamp")
STATIC_TABLE = Table(
    "benchmark",
    "benchmark.csv",
    {
        **_same(*_DEPLOYMENT, "batch_size", "input_length", "output_length"),
        **{"warmup": "warmup_requests", "repeats": "repeats", "state": "state"},
        **{f"latency_{statistic}_ms": f"e2e_{statistic}_ms" for statistic in STATISTICS},
        "throughput_sequences_per_s": "sequences_per_s",
        "throughput_tokens_per_s": "output_tokens_per_s",
        "ci95_latency_mean_ms": "ci95_e2e_mean_ms",
        **_same("server_memory_peak_bytes", "gpu_utilisation_mean_percent", "gpu_memory_peak_bytes"),
        **_same("server_start_s", "server_load_s"),
        **{"errors": "failed_requests", "error": "error", "model_digest": "model_digest", "commit": "commit"},
        **_same(*_HOST, "is_random_weights", "settings_fingerprint", *_ENGINE_COLUMNS),
    },
    {  # of NeMo-Megatron-Launcher's and FasterTransformer's tables
        "Batch Size": "batch_size",
        "Tensor Parallel": "tensor_para_size",
        "Pipeline Parallel": "pipeline_para_size",
        "Input length": "input_length",
        "Output length": "output_length",
        "FT latency (ms)": "e2e_mean_ms",
        "Throughput per GPU (sentence/s)": "sequences_per_s_per_rank",
    },
)
LOAD_TABLE = Table(
    "load sweep",
    "load.csv",
    _same(
        *(*_DEPLOYMENT, "max_batch_size", "max_queue_delay_us", "workload", "mode", "concurrency"),
        *("request_rate_per_s", "arrival", "is_streaming", "requests", "failed_requests", "warmup_requests"),
        *("repeats", "is_stable", "duration_s", "state", "error"),
        *(*FIGURE_COLUMNS, *SERVER_FIGURES, *COST_FIGURES),
        *("model_digest", "is_random_weights", "commit", *_HOST, "settings_fingerprint", *_ENGINE_COLUMNS),
        *(*_WORKLOAD_COLUMNS, *SLO_FIGURES, *BACKLOG_FIGURES),
    ),
)
TABLES = (STATIC_TABLE, LOAD_TABLE)
