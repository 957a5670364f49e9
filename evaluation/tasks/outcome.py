"""The results of a task: ``metrics.json``, ``metrics.csv``, ``summary.json``, ``samples.csv`` and ``manifest.json``."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from evaluation.client.served_identity import check_still_served
from evaluation.client.served_model import Target
from evaluation.speed.provenance import describe_machine, timestamp
from evaluation.speed.tables.cells import plain
from evaluation.speed.tables.row import SCHEMA_VERSION
from evaluation.tasks.metric import Metric
from handover.durable import write_atomically
from handover.errors import ServerError
from handover.manifest import Manifest, record_files
from handover.provenance import read_commit

METRICS_NAME, SUMMARY_NAME, TABLE_NAME, SAMPLES_NAME = "metrics.json", "summary.json", "metrics.csv", "samples.csv"

ORIGIN_COLUMNS = (
    *("schema_version", "commit", "model_digest", "cpu", "cores", "gpu", "gpus", "started_at", "timestamp"),
)
"""Columns at the end of every table that say where the figures are from."""
_STARTED_AT = timestamp()


class Sampled(Protocol):
    """One row of ``samples.csv``: a frozen dataclass with at least its place in the data and its error."""

    @property
    def index(self) -> int:
        """Place in the data file, from 0."""

    @property
    def error(self) -> str:
        """Why it has no score; empty otherwise."""


@dataclass(frozen=True)
class Outcome:
    """The results of one task.

    Attributes:
        metrics: figures, in order.
        samples: one row a sample, in the data's order; dataclasses of one type.
        cut_contexts: number of samples whose context was cut to the model's positions.
        data: file, sha256 and known_as.
        settings: settings of the task, such as its prompt, and other facts that its figures depend on.
    """

    task: str
    metrics: Sequence[Metric]
    samples: Sequence[Sampled]
    cut_contexts: int
    data: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> list[Sampled]:
        """Samples without a score."""
        return [sample for sample in self.samples if sample.error]

    def write(self, output: Path, target: Target, predictions: Mapping[str, str] | None = None) -> None:
        """Write the five files, and predictions: contents of further files, by name.

        Raises:
            ServerError: the deployment serves another model by now.
        """
        check_still_served(target.served.endpoint, target.model)
        output.mkdir(parents=True, exist_ok=True)
        for name, content in (predictions or {}).items():
            write_atomically(output / name, content)
        basis = {"data": dict(self.data), "settings": dict(self.settings), "model": target.identity}
        samples = len(self.samples)
        write_results(
            output,
            {SAMPLES_NAME: self.samples, TABLE_NAME: self.metrics},
            self.summary(target.identity),
            describe_results(
                self.task, self.metrics, samples, len(self.failed), {"cut_contexts": self.cut_contexts, **basis}
            ),
            {**basis, "samples": samples},
        )

    def summary(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return the figures in the format of lm-evaluation-harness; missing ones are null."""
        figures: dict[str, float | None] = {}
        for metric in self.metrics:
            figures |= {f"{metric.name},none": metric.value, f"{metric.name}_stderr,none": metric.stderr}
        return {
            "results": {self.task: {"alias": self.task, **figures}},
            "n-samples": {
                self.task: {"original": len(self.samples), "effective": len(self.samples) - len(self.failed)}
            },
            "config": {"model": "slipway", "model_args": dict(model)},
        }

    def show(self) -> None:
        """Print the figures.

        Raises:
            ServerError: a sample has no score.
        """
        for figure in self.metrics:
            print(figure.line())
        if failed := self.failed:
            raise ServerError(
                f"{len(failed)} of {len(self.samples)} samples have no score; the first, number "
                f"{failed[0].index + 1}: {failed[0].error}"
            )


def describe_results(
    task: str, metrics: Sequence[Metric], samples: int, failed: int, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of ``metrics.json``; ``about`` has model, data and settings of the figures."""
    return {
        "task": task,
        "metrics": [figure.to_json() for figure in metrics],
        "samples": samples,
        "failed": failed,
        **about,
        "schema_version": SCHEMA_VERSION,
        "commit": read_commit(),
        "started_at": _STARTED_AT,
        "timestamp": timestamp(),
        "machine": _machine(),
    }


def write_results(
    output: Path,
    tables: Mapping[str, Sequence[Any]],
    summary: Mapping[str, Any],
    metrics: Mapping[str, Any],
    made_from: Mapping[str, Any],
) -> None:
    """Write ``summary.json``, ``metrics.json`` and the rows of each CSV table by its name, the manifest last."""
    output.mkdir(parents=True, exist_ok=True)
    origin = provenance(metrics, ORIGIN_COLUMNS)
    for name, rows in tables.items():
        write_rows(output / name, rows, origin)
    write_atomically(output / SUMMARY_NAME, json.dumps(summary, indent=1) + "\n")
    write_atomically(output / METRICS_NAME, json.dumps(metrics, indent=1) + "\n")
    Manifest("evaluation", record_files(output), made_from, {"commit": str(metrics["commit"])}).write(output)


def provenance(metrics: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Return what ``metrics.json`` says of the origin of its figures, by a table's columns; None: it is unknown."""
    model = metrics.get("model") or {}
    known = {**model, **metrics, **(metrics.get("machine") or {})}
    ranks = [str(model.get(f"{kind}_para_size", "")) for kind in ("tensor", "pipeline")]
    if known.get("gpu") and all(size.isdigit() for size in ranks):
        known["gpus"] = int(ranks[0]) * int(ranks[1])
    return {column: known.get(column) for column in columns}


def _machine() -> dict[str, Any]:
    machine = describe_machine()
    return {"cpu": machine.cpu, "cores": machine.cores, "gpu": machine.gpu}


def write_rows(path: Path, rows: Sequence[Any], origin: Mapping[str, Any] | None = None) -> None:
    """Write dataclasses of one type, or mappings with the same keys, as CSV: truth values as 0 and 1, None as empty.

    Each row ends with its origin, if it is given.
    """
    given = [{**(row if isinstance(row, Mapping) else dataclasses.asdict(row)), **(origin or {})} for row in rows]
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerows([*row] for row in given[:1])
        for row in given:
            writer.writerow(int(cell) if isinstance(cell, bool) else plain(cell) for cell in row.values())
