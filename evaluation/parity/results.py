"""What a comparison leaves: figures and verdict as JSON, prompts and positions as tables."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from evaluation.client.served_model import ServedModel
from evaluation.parity.arguments import ParityArguments
from evaluation.parity.comparison import GENERATED, Outcome, Position, summarise
from evaluation.parity.findings import Findings
from evaluation.report.provenance import timestamp
from evaluation.speed.cells import plain
from handover.digests import file_digest
from handover.durable import write_atomically
from handover.manifest import Manifest, record_files
from handover.provenance import read_commit

TASK = "parity"


def write_results(
    arguments: ParityArguments,
    served: ServedModel,
    positions: Sequence[Position],
    outcome: Outcome,
    source: Mapping[str, Any],
    findings: Findings,
) -> None:
    """Write everything into the output directory, the manifest last.

    Args:
        arguments: of the run.
        served: the deployment.
        positions: of all prompts.
        outcome: the verdict.
        source: what was compared with, for the record.
        findings: of passages.
    """
    endpoint, output = served.endpoint, arguments.output
    metrics = (*summarise(positions), *findings.metrics)
    _write_table(output / "positions.csv", [dataclasses.asdict(position) for position in positions])
    _write_table(output / "prompts.csv", list(_by_prompt(positions)))
    if findings.scales:
        _write_table(output / "scales.csv", [dataclasses.asdict(scale) for scale in findings.scales])
    first = outcome.first_difference
    verdict = {
        "verdict": outcome.verdict,
        "reasons": list(outcome.reasons),
        "first_difference": None if first is None else {"prompt": first[0], "token": first[1]},
    }
    served_model = {"model": arguments.model, "engine": endpoint.engine, "model_digest": endpoint.model_digest}
    content = {
        "task": TASK,
        "metrics": [metric.to_json() for metric in metrics],
        "samples": len({position.prompt for position in positions}),
        "failed": 0,
        "data": _describe_data(arguments.data_path),
        "model": {**served_model, **endpoint.settings},
        "source": source,
        **verdict,
        "commit": read_commit(),
        "timestamp": timestamp(),
    }
    write_atomically(output / "metrics.json", json.dumps(content, indent=1) + "\n")
    figures = {metric.name: metric.value for metric in metrics}
    summary = {**verdict, **figures, "source": source, **served_model}
    write_atomically(output / "summary.json", json.dumps(summary, indent=1) + "\n")
    made_from = {"data": content["data"], "model": content["model"], "source": source}
    Manifest("evaluation", record_files(output), made_from, {"commit": str(content["commit"])}).write(output)


def _describe_data(file: Path | None) -> dict[str, str]:
    if file is None:
        return {"file": "prompts of the configuration", "sha256": ""}
    return {"file": file.name, "sha256": file_digest(file).removeprefix("sha256:")}


def _by_prompt(positions: Sequence[Position]) -> Iterable[dict[str, Any]]:
    """A row a prompt; its first differing token is empty where there is none."""
    for number, group in groupby(positions, key=lambda position: position.prompt):
        rows = list(group)
        figures = {metric.name: metric.value for metric in summarise(rows)}
        generated = [row for row in rows if row.part == GENERATED]
        yield {
            "prompt": number,
            "scored_tokens": len(rows),
            "generated_tokens": len(generated),
            "first_differing_token": next((row.place for row in generated if not row.agrees), None),
            **{name: figures[name] for name in figures if name != "identical_continuations"},
        }


def _write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({name: int(cell) if isinstance(cell, bool) else plain(cell) for name, cell in row.items()})
