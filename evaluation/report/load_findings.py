"""A load sweep as the report reads it, with what makes its figures less than they seem."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.speed.load_table import FAILED, OK, SUMMARY, LoadRow, read_rows

_CLIENT_LIMIT = 0.8
"""Cores that one event loop may use before it, not the server, is what is measured."""


@dataclass(frozen=True)
class Load:
    """One ``load.csv``.

    Attributes:
        name: of the benchmark.
        directory: that it lies in.
        rows: one a point, in the file's order.
        finished: False for what a failed or killed stage left.
        slos: limits of a good request in ms, by the name of a distribution; empty if there were none.
    """

    name: str
    directory: Path
    rows: tuple[LoadRow, ...]
    finished: bool
    slos: Mapping[str, float] = field(default_factory=dict)

    @property
    def measured(self) -> tuple[LoadRow, ...]:
        """Rows with figures."""
        return tuple(row for row in self.rows if row.state == OK)

    @property
    def failed(self) -> tuple[LoadRow, ...]:
        """Rows without figures."""
        return tuple(row for row in self.rows if row.state == FAILED)


def read_loads(found: Sequence[tuple[Path, bool]], remarks: list[str]) -> Iterable[Load]:
    """Read load sweeps, and say what is wrong with them.

    Args:
        found: tables, and whether each is published.
        remarks: sentences are added.
    """
    for path, finished in found:
        name = path.parent.name.removesuffix(".partial")
        try:
            load = Load(name, path.parent, tuple(read_rows(path)), finished, read_slos(path.parent / SUMMARY))
        except (ValueError, KeyError, TypeError) as error:
            remarks.append(f"The table of benchmark {name} is damaged and left out ({error}).")
            continue
        remarks += _load_remarks(load)
        yield load


def read_slos(path: Path) -> dict[str, float]:
    """Read the limits that goodput was counted by from the sweep's ``summary.json``; empty if it has none."""
    try:
        points = json.loads(path.read_text())["points"]
        limits = [point["result"]["goodput_slos_ms"] for point in points if point["result"]]
        return {str(name): float(limit) for name, limit in (limits[0] if limits else {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _load_remarks(load: Load) -> list[str]:
    """Say what makes the figures of a load less than they seem."""
    said = []
    if not load.finished:
        said.append(f"The benchmark {load.name} did not finish: points may be missing.")
    if load.failed:
        said.append(f"{len(load.failed)} of {len(load.rows)} points of benchmark {load.name} failed.")
    losses = [row for row in load.measured if row.failed_requests]
    if losses:
        count = sum(row.failed_requests for row in losses)
        said.append(f"{count} requests of benchmark {load.name} failed: {losses[0].error}.")
    shaky = [row.label for row in load.measured if not row.is_stable]
    if shaky:
        said.append(f"The repeats of benchmark {load.name} did not agree closely at {', '.join(dict.fromkeys(shaky))}.")
    if any((row.figures.get("client_cpu_cores") or 0) > _CLIENT_LIMIT for row in load.measured):
        said.append(
            f"The client of benchmark {load.name} was near one core's limit: the server may do more than is shown."
        )
    if any(row.is_random_weights for row in load.rows):
        said.append(f"The benchmark {load.name} was measured on random weights.")
    return said
