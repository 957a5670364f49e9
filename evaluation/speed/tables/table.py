"""The tables of measured points: one row type, and the columns that each of the two CSV files shows of it."""

from __future__ import annotations

import csv
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.speed.tables.backlog import BACKLOG_FIGURES
from evaluation.speed.tables.cells import csv_text, parse
from evaluation.speed.tables.costs import COST_FIGURES, ENERGY_FIGURES
from evaluation.speed.tables.figures import FIGURE_COLUMNS, NEWER_FIGURES, STATISTICS
from evaluation.speed.tables.row import CLOSED, FAILED, OK, OPEN, OPENAI, STATIC, TRITON, Row
from evaluation.speed.tables.server_metrics import SERVER_FIGURES
from ft_format.weight_format import KEY
from handover.durable import write_atomically

__all__ = ["CLOSED", "FAILED", "LOAD_TABLE", "OK", "OPEN", "OPENAI", "STATIC", "STATIC_TABLE", "TRITON", "Row", "Table"]

SUMMARY = "summary.json"
PROFILE = "profile_export.json"
SEARCH = "search"
"""Beside the table, without an ending: the highest rates that were found."""
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
_ORIGIN_COLUMNS = (
    *("schema_version", "validity", "validity_reasons", "gpus", "started_at", "deployment_label", "replicas"),
)
_NEWER_LOAD_COLUMNS = (*NEWER_FIGURES, "slos", "probe", "sent_requests")
NEWER_COLUMNS = (
    *(KEY, "versions", *_ENGINE_COLUMNS, *_WORKLOAD_COLUMNS, *SLO_FIGURES, *BACKLOG_FIGURES),
    *(*_ORIGIN_COLUMNS, *_NEWER_LOAD_COLUMNS),
)
"""Columns that tables of earlier versions do not have; such tables are still read. A new column is added here."""

_FIELDS = typing.get_type_hints(Row)
FIGURES = frozenset(
    (*FIGURE_COLUMNS, *NEWER_FIGURES, *SERVER_FIGURES, *COST_FIGURES, *ENERGY_FIGURES, *DERIVED_FIGURES, *SLO_FIGURES)
) | {*BACKLOG_FIGURES, "sequences_per_s", "server_idle_s"}
"""What a row has in ``figures``; its other columns are its fields and properties."""


@dataclass(frozen=True)
class Table:
    """The shape of one CSV file.

    Attributes:
        content: what it holds, for messages.
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
        return {column: name for column, name in self.columns.items() if name in FIGURES}

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
        if given.get("gpus"):
            fields["given_gpus"] = int(given["gpus"])
        figures = {name: float(given[name]) if given.get(name) else None for name in self.figures.values()}
        return Row(**fields, figures=figures)


def _same(*names: str) -> dict[str, str]:
    """Columns that are called like their fields."""
    return {name: name for name in names}


_DEPLOYMENT = (
    *("model", "triton_model", "engine", "tensor_para_size", "pipeline_para_size"),
    *("weight_data_type", "data_type"),
)
_HOST = (KEY, "versions", "cpu", "cores", "memory_bytes", "gpu", "timestamp")
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
        **_same(*_HOST, "is_random_weights", "settings_fingerprint", *_ENGINE_COLUMNS, *_ORIGIN_COLUMNS),
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
        *(*_WORKLOAD_COLUMNS, *SLO_FIGURES, *BACKLOG_FIGURES, *_ORIGIN_COLUMNS, *_NEWER_LOAD_COLUMNS),
    ),
)
TABLES = (STATIC_TABLE, LOAD_TABLE)
