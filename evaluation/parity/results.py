"""The files of a comparison: figures and verdict as JSON, prompts and positions as CSV tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from evaluation.client.served_model import Target
from evaluation.parity.arguments import ParityArguments
from evaluation.parity.comparison import GENERATED, ParityOutcome, Position, summarise
from evaluation.parity.distances import PassageFindings
from evaluation.tasks import outcome as files
from handover.digests import file_digest

TASK = "parity"


def write_results(
    arguments: ParityArguments,
    target: Target,
    positions: Sequence[Position],
    outcome: ParityOutcome,
    source: Mapping[str, Any],
    findings: PassageFindings,
) -> None:
    """Write everything into the output directory, the manifest last; ``source`` describes the reference."""
    metrics = (*summarise(positions), *findings.metrics)
    tables: dict[str, Sequence[Any]] = {"positions.csv": positions, "prompts.csv": list(_by_prompt(positions))}
    if findings.scales:
        tables["scales.csv"] = findings.scales
    first = outcome.first_difference
    verdict = {
        "verdict": outcome.verdict,
        "reasons": list(outcome.reasons),
        "first_difference": None if first is None else {"prompt": first[0], "token": first[1]},
    }
    data, model = _describe_data(arguments.data_path), target.identity
    served_model = {key: model[key] for key in ("model", "engine", "model_digest")}
    prompts = len({position.prompt for position in positions})
    files.write_results(
        arguments.output,
        tables,
        {**verdict, **{metric.name: metric.value for metric in metrics}, "source": source, **served_model},
        files.describe_results(TASK, metrics, prompts, 0, {"data": data, "model": model, "source": source, **verdict}),
        {"data": data, "model": model, "source": source},
    )


def _describe_data(file: Path | None) -> dict[str, str]:
    if file is None:
        return {"file": "prompts of the configuration", "sha256": ""}
    return {"file": file.name, "sha256": file_digest(file).removeprefix("sha256:")}


def _by_prompt(positions: Sequence[Position]) -> Iterable[dict[str, Any]]:
    """Yield a row for each prompt; the first differing token is empty without one."""
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
