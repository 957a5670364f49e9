"""The table of benchmarks.peers.compare: a row for each case and figure, the engines side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from evaluation.report.formatting import markdown_table, show_figure
from evaluation.speed.tables.cells import csv_text
from handover.durable import write_atomically

Lines = list[dict[str, Any]]
"""What one engine measured, in all rounds: cases with their figures."""
_SLIPWAY, _PEER = "slipway", "vllm"
_FACTS, _TOKENS = "engine", "agreement"


@dataclass(frozen=True)
class Row:
    """One figure of one case; what one side has not measured is None.

    Attributes:
        model, data_type: that both served.
        case: the requests.
        figure: name with its unit.
        slipway, vllm: medians over the rounds.
        ratio: slipway / vllm: below 1 is better where the figure is in ms, above 1 where it is a rate. Of
            ``equal_tokens`` it is the share of equal tokens itself.
        slipway_low, slipway_high, vllm_low, vllm_high: the extremes of the rounds.
        rounds: of the side that has more.
        gpu, torch, commit: of the drop-in engine; several GPUs with their number.
        vllm_version, vllm_commit, vllm_torch: of the peer; its commit where its build says it.
        slipway_settings, vllm_settings: as each engine describes itself.
    """

    model: str
    data_type: str
    case: str
    figure: str
    slipway: float | None
    vllm: float | None
    ratio: float | None
    slipway_low: float | None
    slipway_high: float | None
    vllm_low: float | None
    vllm_high: float | None
    rounds: int
    gpu: str
    torch: str
    commit: str
    vllm_version: str
    vllm_commit: str
    vllm_torch: str
    slipway_settings: str
    vllm_settings: str


def comparison_rows(lines: Mapping[str, Lines], model: str, data_type: str, commit: str) -> Iterator[Row]:
    """Put the engines' figures side by side.

    Args:
        lines: what each engine measured, by its name.
        model: for the rows.
        data_type: for the rows.
        commit: of the drop-in engine where its process found none.
    """
    told = {"model": model, "data_type": data_type, **_identity(lines, commit)}
    ours, theirs = (_values(lines.get(name, [])) for name in (_SLIPWAY, _PEER))
    for key in dict.fromkeys((*theirs, *ours)):
        yield Row(case=key[0], figure=key[1], **_sides(ours.get(key, []), theirs.get(key, [])), **told)
    share = agreement_of(lines)
    if share is not None:
        yield Row(case=_TOKENS, figure="equal_tokens", **_sides([], []) | {"ratio": share}, **told)


def _sides(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return the medians, their ratio and the extremes of a figure's values, under the names of Row."""
    first, second = (statistics.median(values) if values else None for values in (ours, theirs))
    found: dict[str, Any] = {"slipway": first, "vllm": second, "rounds": max(len(ours), len(theirs))}
    for name, values in ((_SLIPWAY, ours), (_PEER, theirs)):
        found |= {f"{name}_low": min(values, default=None), f"{name}_high": max(values, default=None)}
    return found | {"ratio": first / second if first is not None and second else None}


def _identity(lines: Mapping[str, Lines], commit: str) -> dict[str, str]:
    own, peer = (_facts(lines.get(name, [])) for name in (_SLIPWAY, _PEER))
    return {
        "gpu": own.get("gpu") or peer.get("gpu", ""),
        "torch": own.get("torch", ""),
        "commit": own.get("commit") or commit,
        "vllm_version": peer.get("version", ""),
        "vllm_commit": peer.get("commit", ""),
        "vllm_torch": peer.get("torch", ""),
        "slipway_settings": own.get("settings", ""),
        "vllm_settings": peer.get("settings", ""),
    }


def agreement_of(lines: Mapping[str, Lines]) -> float | None:
    """Return the share of places of the greedy continuations where both engines have the same token.

    None where either did not continue them: the weights were made up, or a process failed.
    """
    found = [
        [line["figures"]["tokens"] for line in lines.get(name, []) if line["case"] == _TOKENS]
        for name in (_SLIPWAY, _PEER)
    ]
    if not all(found):
        return None
    ours, theirs = ([token for tokens in each[0] for token in tokens] for each in found)
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the table."""
    write_atomically(path, csv_text([[each.name for each in fields(Row)], *(list(asdict(r).values()) for r in rows)]))


def print_rows(rows: Sequence[Row]) -> None:
    """Print figures and ratios, and above them what was measured."""
    if rows:
        row = rows[0]
        print(f"slipway {row.commit or 'of an unknown commit'}, torch {row.torch}: {row.slipway_settings}")
        if row.vllm_version:
            built = f" ({row.vllm_commit})" if row.vllm_commit else ""
            print(f"vllm {row.vllm_version}{built}, torch {row.vllm_torch}: {row.vllm_settings}")
        print(f"{row.model}, {row.data_type}, {row.gpu or 'no GPU'}")
    columns = ("case", "figure", "slipway", "vllm", "ratio")
    cells = [(r.case, r.figure, *map(show_figure, (r.slipway, r.vllm, r.ratio))) for r in rows]
    print(markdown_table(columns, cells, columns[2:]))


def _values(lines: Lines) -> dict[tuple[str, str], list[float]]:
    """Return the values of each case's figures over all rounds."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        if line["case"] not in (_FACTS, _TOKENS):
            for figure, value in line["figures"].items():
                found.setdefault((line["case"], figure), []).append(value)
    return found


def _facts(lines: Lines) -> dict[str, str]:
    return next((line["figures"] for line in lines if line["case"] == _FACTS), {})
