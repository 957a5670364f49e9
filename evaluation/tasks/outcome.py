"""What a task leaves: ``metrics.json``, ``metrics.csv``, ``summary.json``, ``samples.csv`` and ``manifest.json``."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from evaluation.client.served_model import ServedModel, check_still_served
from evaluation.report.provenance import timestamp
from evaluation.speed.cells import plain
from evaluation.tasks.metric import Metric
from handover.durable import write_atomically
from handover.errors import ServerError
from handover.manifest import Manifest, record_files
from handover.provenance import read_commit

METRICS_NAME, SUMMARY_NAME, TABLE_NAME, SAMPLES_NAME = "metrics.json", "summary.json", "metrics.csv", "samples.csv"


class Sampled(Protocol):
    """One row of ``samples.csv``: a frozen dataclass with the line it stands for and why it has no score."""

    @property
    def index(self) -> int:
        """Place in the data file, from 0."""

    @property
    def error(self) -> str:
        """Why it has no score; empty otherwise."""


@dataclass(frozen=True)
class Outcome:
    """All that one task found out.

    Attributes:
        task: its name.
        metrics: figures, in order.
        samples: one row each, in the data's order; dataclasses of one type.
        cut_contexts: samples whose context was cut to the model's positions.
        data: file, sha256 and known_as.
        settings: of the task, such as its prompt, and what else its figures rest on.
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

    def write(self, output: Path, model: str, served: ServedModel) -> None:
        """Write the five files.

        Args:
            output: directory.
            model: Triton's name of the model that was asked.
            served: the deployment behind it.

        Raises:
            ServerError: the deployment was replaced by one of another model since it was asked.
        """
        check_still_served(served.endpoint, model)
        output.mkdir(parents=True, exist_ok=True)
        endpoint = served.endpoint
        asked = {"model": model, "engine": endpoint.engine, "model_digest": endpoint.model_digest, **endpoint.settings}
        content = {
            "task": self.task,
            "metrics": [figure.to_json() for figure in self.metrics],
            "samples": len(self.samples),
            "failed": len(self.failed),
            "cut_contexts": self.cut_contexts,
            "data": dict(self.data),
            "settings": dict(self.settings),
            "model": asked,
            "commit": read_commit(),
            "timestamp": timestamp(),
        }
        _write_rows(output / SAMPLES_NAME, self.samples)
        _write_rows(output / TABLE_NAME, self.metrics)
        write_atomically(output / SUMMARY_NAME, json.dumps(self.summary(asked), indent=1) + "\n")
        write_atomically(output / METRICS_NAME, json.dumps(content, indent=1) + "\n")
        made_from = {
            "data": content["data"],
            "settings": content["settings"],
            "model": asked,
            "samples": len(self.samples),
        }
        Manifest("evaluation", record_files(output), made_from, {"commit": str(content["commit"])}).write(output)

    def summary(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Shape the figures as lm-evaluation-harness does; what is missing is null."""
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


def _write_rows(path: Path, rows: Sequence[Any]) -> None:
    def cell(value: Any) -> Any:
        return "" if value is None else int(value) if isinstance(value, bool) else plain(value)

    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        for row in rows[:1]:
            writer.writerow([column.name for column in dataclasses.fields(row)])
        writer.writerows([cell(value) for value in dataclasses.astuple(row)] for row in rows)
