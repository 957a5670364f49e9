"""The points of a sweep, read from their results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from evaluation.arguments import POINTS_NAME
from evaluation.report.benchmarks import Benchmark
from evaluation.report.comparable import parity_of
from evaluation.report.data import Findings, collect_findings
from evaluation.report.formatting import show_figure
from evaluation.report.ranking import DeploymentCandidate, find_candidates
from evaluation.report.text import accuracy_cells
from ft_format.weight_format import KEY, find_format
from handover.errors import ArtefactError
from handover.manifest import Manifest
from handover.progress import human_bytes
from handover.reasons import reason_of

_WEIGHTS = f"export.triton_deployment.{KEY}"


@dataclass(frozen=True)
class Point:
    """One configuration of a sweep.

    Attributes:
        label: name that its deployment was given, or the settings in which it differs from others: ``TP 2``.
        results: results directory; empty if the point could not be planned.
        error: why the point failed; empty if it did not.
        candidates: measured points of its benchmarks.
        accuracies: first figure of each evaluation as text, by its name.
        remarks: remarks of the point's own report.
        parameters: number of parameters of the model; None if unknown.
        parallelism: ``TP 2, PP 1``, with ``int8`` where the engine computes with it.
        digest: digest of the served model.
        server_memory_peak_bytes: highest value of the benchmarks.
        slos_ms: limits of the load's goodput.
        engine: what served the point; empty where nothing was measured or evaluated.
        identity: what the evaluations say of the served model: digest, versions, data types, flags.
        parity, parity_reasons: verdict of the parity evaluation, and why; empty where it was not evaluated.
        figures: every figure of each evaluation as text, by its name.
        benchmarks: with their rows.
    """

    label: str
    title: str
    results: str
    error: str
    candidates: tuple[DeploymentCandidate, ...] = ()
    accuracies: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    parameters: int | None = None
    parallelism: str = ""
    digest: str = ""
    server_memory_peak_bytes: float | None = None
    slos_ms: Mapping[str, float] = field(default_factory=dict)
    engine: str = ""
    identity: Mapping[str, str] = field(default_factory=dict)
    parity: str = ""
    parity_reasons: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)
    benchmarks: tuple[Benchmark, ...] = ()


def read_points(directory: Path) -> list[Point]:
    """Read all points of the launcher's list, in their order.

    Raises:
        ArtefactError: there is no list of points, or it is damaged.
    """
    file = directory / POINTS_NAME
    try:
        keys = ("label", "title", "results", "error")
        entries = [[str(entry[key]) for key in keys] for entry in json.loads(file.read_text())]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"{file} cannot be read: {error}", "give the directory of a sweep (main.py -m)") from error
    shown = short_labels([label for label, *_ in entries])
    return _with_given_names([_point(label, *rest) for label, (_, *rest) in zip(shown, entries, strict=True)])


def short_labels(labels: Sequence[str]) -> list[str]:
    """Shorten the paths and addresses in labels such as ``endpoint http://a:1/v1, TP 2`` to where they differ."""
    settings = [[setting.partition(" ") for setting in label.split(", ")] for label in labels]
    texts: dict[str, list[str]] = {}
    for key, _, value in (setting for point in settings for setting in point):
        if "/" in value:
            texts.setdefault(key, []).append(value)
    short = {(key, value): text for key, values in texts.items() for value, text in _differing(values)}
    return [
        ", ".join(f"{key}{space}{short.get((key, value), value)}" for key, space, value in point) for point in settings
    ]


def _differing(values: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Yield each path with the parts of it from the first to the last in which it differs from another."""
    found = list(dict.fromkeys(values))
    parts = [value.split("/") for value in found]
    shortest = min(map(len, parts))
    first = next((n for n in range(shortest) if len({part[n] for part in parts}) > 1), shortest - 1)
    last = next((n for n in range(shortest - first) if len({part[-1 - n] for part in parts}) > 1), 0)
    for value, part in zip(found, parts, strict=True):
        yield value, "/".join(part[first : len(part) - last]) or part[-1]


def _with_given_names(points: Sequence[Point]) -> list[Point]:
    """Call points by the names that were given to their deployments, where each has one of its own."""
    given = [
        next((row.deployment_label for b in point.benchmarks for row in b.rows if row.deployment_label), "")
        for point in points
    ]
    return [
        replace(point, label=name) if name and given.count(name) == 1 else point
        for point, name in zip(points, given, strict=True)
    ]


def sweep_columns(points: Sequence[Point]) -> tuple[str, ...]:
    """Columns of the table of points: accuracy, latency and throughput by workload, memory."""
    accuracies = dict.fromkeys(name for point in points for name in point.accuracies)
    workloads = dict.fromkeys(candidate.workload for point in points for candidate in point.candidates)
    speeds = [f"{workload} {what}" for workload in workloads for what in ("p50, ms", "tokens/s")]
    return "Point", *accuracies, *speeds, "Server memory"


def sweep_rows(points: Sequence[Point], columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Cells under ``sweep_columns``: latency is that of the smallest load, throughput the highest."""
    rows = []
    for point in points:
        cells = {"Point": point.label, **point.accuracies}
        memory = point.server_memory_peak_bytes
        cells["Server memory"] = "" if memory is None else human_bytes(memory)
        for candidate in smallest_loads(point.candidates):
            cells[f"{candidate.workload} p50, ms"] = show_figure(candidate.latencies_ms.get("e2e_p50_ms"))
            fastest = max(c.tokens_per_s for c in point.candidates if c.workload == candidate.workload)
            cells[f"{candidate.workload} tokens/s"] = show_figure(fastest)
        rows.append(tuple(cells.get(column, "") for column in columns))
    return rows


def smallest_loads(candidates: Iterable[DeploymentCandidate]) -> list[DeploymentCandidate]:
    """Return the first candidate of each source and workload, which has the smallest load."""
    first: dict[tuple[str, str], DeploymentCandidate] = {}
    for candidate in candidates:
        first.setdefault((candidate.source, candidate.workload), candidate)
    return list(first.values())


def _point(label: str, title: str, results: str, error: str) -> Point:
    if not results:
        return Point(label, title, results, error)
    root = Path(results)
    findings = collect_findings(root, title, root / "logs" / "stages.json")
    bad = [outcome for outcome in findings.stages if outcome.is_bad and outcome.error]
    candidates = tuple(find_candidates(findings, results))
    accuracies = _accuracies(findings, most=1)
    parity, parity_reasons = parity_of(findings)
    rows = [row for benchmark in findings.benchmarks for row in benchmark.rows]
    identity = {key: str(value) for each in findings.evaluations for key, value in each.model.items() if value}
    is_started = bool(candidates or accuracies)
    return Point(
        label,
        findings.title,
        results,
        error or "; ".join(f"{outcome.label}: {reason_of(outcome.error)}" for outcome in bad),
        candidates,
        accuracies,
        findings.remarks if is_started else (),
        _parameters(root),
        next((_parallelism(candidate) for candidate in candidates), ""),
        "" if findings.repository is None else findings.repository.digest,
        _memory_peak(findings),
        {name: limit for benchmark in findings.benchmarks for name, limit in benchmark.slos.items()},
        next((row.engine for row in rows if row.engine), identity.get("engine", "")),
        identity,
        parity,
        parity_reasons,
        _accuracies(findings),
        findings.benchmarks,
    )


def _accuracies(findings: Findings, most: int | None = None) -> dict[str, str]:
    """Show the figures of each evaluation, at most the first ``most`` of each."""
    return {
        f"{evaluation.name} {metric.name}": accuracy_cells(metric)[1]
        for evaluation in findings.evaluations
        for metric in evaluation.metrics[:most]
    }


def _parallelism(candidate: DeploymentCandidate) -> str:
    sizes = [
        candidate.settings.get(f"export.{key}_model_parallel_size", 1)
        for key in ("model.tensor", "triton_deployment.pipeline")
    ]
    weights = find_format(candidate.settings.get(_WEIGHTS))
    return f"TP {sizes[0]}, PP {sizes[1]}" + (f", {weights.name}" if weights else "")


def _memory_peak(findings: Findings) -> float | None:
    measured = (row for benchmark in findings.benchmarks for row in benchmark.measured)
    peaks = [row.figures.get("server_memory_peak_bytes") for row in measured]
    return max((peak for peak in peaks if peak is not None), default=None)


def _parameters(results: Path) -> int | None:
    """Return the number of parameters in the shards, which hold replicated tensors once."""
    try:
        files = Manifest.read(results / "model_repo").files
    except ArtefactError:
        return None
    return sum(math.prod(record.shape) for record in files if record.shape is not None) or None
