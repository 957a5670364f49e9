"""The benchmarks of a run as the report reads them, with remarks on their figures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.report.published import PARTIAL, Remarks, change_of, newest_results
from evaluation.speed.tables.slo_verdict import EXCEEDED, HOLDS
from evaluation.speed.tables.table import FAILED, LOAD_TABLE, OPEN, SEARCH, SUMMARY, TABLES, Row, Table

_CLIENT_SHARE = 0.1
_CLIENT_LIMIT = 0.8
"""Processor cores of the client above which its single event loop, not the server, may limit the figures."""


@dataclass(frozen=True)
class Benchmark:
    """One ``benchmark.csv`` or ``load.csv``.

    Attributes:
        table: shape of the file.
        rows: one row a point, in the file's order.
        finished: False for the results of a failed or interrupted stage.
        slos: limits of a good request in ms, by the name of a distribution; empty without limits.
        found: what searches for the highest rate found, as ``search.json`` says it.
    """

    name: str
    directory: Path
    table: Table
    rows: tuple[Row, ...]
    finished: bool
    slos: Mapping[str, float] = field(default_factory=dict)
    found: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_load(self) -> bool:
        """Whether it was measured under load."""
        return self.table is LOAD_TABLE

    @property
    def measured(self) -> tuple[Row, ...]:
        """Rows with figures."""
        return tuple(row for row in self.rows if row.is_measured)

    @property
    def failed(self) -> tuple[Row, ...]:
        """Rows without figures."""
        return tuple(row for row in self.rows if row.state == FAILED)


def read_benchmarks(root: Path, remarks: Remarks) -> Iterable[Benchmark]:
    """Read all benchmarks of a run, static ones first.

    Args:
        root: directory of a run's benchmarks.
        remarks: sentences about missing or doubtful figures are added.
    """
    for table in TABLES:
        for path, finished in newest_results(root, table.file_name, remarks):
            name = path.parent.name.removesuffix(PARTIAL)
            try:
                rows, slos = tuple(table.read(path)), read_slos(path.parent / SUMMARY)
                found = _read_found(path.parent / f"{SEARCH}.json")
            except (ValueError, KeyError, TypeError) as error:
                sentence = f"The table of benchmark {name} is damaged and left out ({error})."
                remarks.leave_out(name, sentence, f"the table is damaged ({error})")
                continue
            benchmark = Benchmark(name, path.parent, table, rows, finished, slos, found)
            remarks += _remarks(benchmark)
            yield benchmark


def read_slos(path: Path) -> dict[str, float]:
    """Read the limits of goodput from a load's ``summary.json``; empty if it has none."""
    try:
        points = json.loads(path.read_text())["points"]
        limits = [point["result"]["goodput_slos_ms"] for point in points if point["result"]]
        return {str(name): float(limit) for name, limit in (limits[0] if limits else {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _read_found(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Read what searches found; empty for a benchmark without one.

    Raises:
        ValueError, KeyError, TypeError: the file is damaged.
    """
    if not path.is_file():
        return ()
    if change := change_of(path):
        raise ValueError(change)
    return tuple({"workload": str(each["workload"]), **each} for each in json.loads(path.read_text())["found"])


def _remarks(benchmark: Benchmark) -> list[str]:
    """Return the remarks on a benchmark's figures."""
    name, said = benchmark.name, []
    if not benchmark.finished:
        said.append(f"The benchmark {name} did not finish: points may be missing.")
    if benchmark.failed:
        said.append(f"{len(benchmark.failed)} of {len(benchmark.rows)} points of benchmark {name} failed.")
    if benchmark.is_load:
        said += _load_remarks(benchmark)
    if any(row.is_random_weights for row in benchmark.rows):
        # After the remarks on a load, but before the failures of a static sweep.
        said.insert(
            len(said) if benchmark.is_load else len(said) - bool(benchmark.failed),
            f"The benchmark {name} was measured on random weights.",
        )
    return said


def _load_remarks(load: Benchmark) -> list[str]:
    said = []
    losses = [row for row in load.measured if row.failed_requests]
    if losses:
        count = sum(row.failed_requests for row in losses)
        said.append(f"{count} requests of benchmark {load.name} failed: {losses[0].error}.")
    said += [f"Benchmark {load.name}: {remark}." for remark in dict.fromkeys(row.remark for row in load.rows) if remark]
    said += _highest_rates(load)
    unstable = [row.label for row in load.measured if not (row.is_stable or row.slo_verdict)]
    if unstable:
        labels = ", ".join(dict.fromkeys(unstable))
        said.append(f"The repeats of benchmark {load.name} did not agree closely at {labels}.")
    said += [*_client_remarks(load), *_overload_remarks(load)]
    if any((row.figures.get("client_cpu_cores") or 0) > _CLIENT_LIMIT for row in load.measured):
        said.append(
            f"The client of benchmark {load.name} was near one core's limit: the server may do more than is shown."
        )
    return said


def _client_remarks(load: Benchmark) -> list[str]:
    """Return where the client itself took a share of a limit, by its own work or by what may be in flight."""
    limits = [limit for name, limit in load.slos.items() if name in ("ttft", "e2e")]
    if not limits:
        return []
    said, share_ms = [], _CLIENT_SHARE * min(limits)
    for column, what in (("client_lag_p99_ms", "by its own work"), ("client_queue_p99_ms", "for room in flight")):
        late = [(row.figures.get(column) or 0.0, row.label) for row in load.measured if row.mode == OPEN]
        late_ms, label = max(late, default=(0.0, ""))
        if late_ms > share_ms:
            said.append(
                f"The client of benchmark {load.name} kept requests waiting {what}, by up to {late_ms:.3g} ms "
                f"(99th percentile, {label}): more than a tenth of the smallest limit."
            )
    return said[:1]


def _overload_remarks(load: Benchmark) -> list[str]:
    """Return where answers did not keep up with arrivals, and where the number of GPUs is not known."""
    over = [row for row in load.measured if "overloaded" in row.validity_reasons]
    said = [f"Benchmark {load.name}, {row.label}: {row.validity_reasons}." for row in over]
    if any(row.gpus is None for row in load.measured):
        said.append(
            f"How many GPUs serve benchmark {load.name} is not known: tokens/s/GPU, costs and the Pareto front are "
            "left out. benchmark.gpus says it."
        )
    return said


def _highest_rates(load: Benchmark) -> list[str]:
    """Say, for each workload of a search, at which highest rate the SLOs hold."""
    said = []
    for workload in dict.fromkeys(row.workload for row in load.measured if row.slo_verdict):
        levels: dict[str, list[float]] = {}
        for row in load.measured:
            if row.workload == workload:
                levels.setdefault(row.slo_verdict, []).append(row.level)
        held, exceeded = max(levels.get(HOLDS, [0.0])), min(levels.get(EXCEEDED, [math.inf]))
        above = f"; they are exceeded at {exceeded:g}" if math.isfinite(exceeded) else ""
        found = f"hold at up to {held:g} requests/s" if held else "were not shown to hold at any rate"
        said.append(f"The SLOs of benchmark {load.name} {found} of {workload}{above}.")
    return said
