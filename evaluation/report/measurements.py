"""Every figure of a run by name, with its noise, for comparisons and for the gate.

Names are ``<task>.<figure>`` for accuracy, ``<benchmark>.<input>-<output>_batch<n>.<column>`` for a static sweep and
``<benchmark>.<lengths>_concurrency<n>.<column>`` (or ``_rate<r>``) for a load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.report.data import Findings, collect_findings
from evaluation.tasks.metric import FRACTION
from handover.errors import ArtefactError

LOWER, HIGHER = "lower", "higher"
_TWO_SIDED_95 = 1.96
_LOWER_IS_BETTER = (
    "_ms",
    "_bytes",
    "_s",
    "_token_j",
    "million_tokens",
    "million_output_tokens",
    "perplexity",
    "_difference",
)
_HIGHER_IS_BETTER = ("_per_s", "_per_user", "_per_gpu", "sequence_per_s")
_UNJUDGED = (
    *("server_mean_batch", "server_requests", "server_failures", "gpu_utilisation_mean_percent", "_watts"),
    *("offered_requests_per_s", "backlog_at_end"),
)


@dataclass(frozen=True)
class Measurement:
    """One figure.

    Attributes:
        name: name as the module's description defines it.
        value: value in the unit that the name ends with.
        noise: half of its 95% confidence interval; None if unknown.
        better: ``lower``, ``higher``, or empty where neither is better.
        source: digest and number of samples of the data for accuracy; empty for a benchmark.
        doubt: why the value is not reliable; empty if it is.
        is_fraction: whether it is shown in percent.
    """

    name: str
    value: float
    noise: float | None
    better: str
    source: str = ""
    doubt: str = ""
    is_fraction: bool = False


@dataclass(frozen=True)
class Report:
    """A run's figures.

    Attributes:
        name: name of the results directory.
        figures: figures by name.
        digests: digests of the measured models, and of the repository in the results directory.
        machines: machines that measured.
        remarks: remarks of the run's report.
        failures: points that could not be measured, with the reason.
        verdicts: name, verdict and reasons of each evaluation that has limits of its own.
    """

    name: str
    figures: Mapping[str, Measurement]
    digests: tuple[str, ...]
    machines: tuple[str, ...]
    remarks: tuple[str, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    verdicts: tuple[tuple[str, str, str], ...] = ()


def read_report(results: Path) -> Report:
    """Read a run's results directory.

    Raises:
        ArtefactError: nothing was measured there.
    """
    findings = collect_findings(results, results.name, results / "logs" / "stages.json")
    figures = {figure.name: figure for figure in _all(findings)}
    if not figures:
        raise ArtefactError(
            f"{results} holds no figures", "give the results directory of a run: the one with evaluation/ or benchmark/"
        )
    digests = {evaluation.model.get("model_digest", "") for evaluation in findings.evaluations}
    rows = [row for benchmark in findings.benchmarks for row in benchmark.rows]
    digests |= {row.model_digest for row in rows}
    digests |= {findings.repository.digest} if findings.repository is not None else set()
    machines = {", ".join(part for part in (row.cpu, f"{row.cores} cores", row.gpu) if part) for row in rows}
    return Report(
        name=results.name,
        figures=figures,
        digests=tuple(sorted(filter(None, digests))),
        machines=tuple(sorted(machines)),
        remarks=findings.remarks,
        failures={f"{b.name}.{row.directory}": row.error for b in findings.benchmarks for row in b.failed},
        verdicts=tuple((e.task, e.verdict, "; ".join(e.reasons)) for e in findings.evaluations if e.verdict),
    )


def direction(name: str) -> str:
    """Return which direction of a figure is better, by its unit; empty where neither is."""
    if name.endswith(_UNJUDGED) or "_cpu_cores" in name:
        return ""
    if name.endswith(_HIGHER_IS_BETTER):
        return HIGHER
    return LOWER if name.endswith(_LOWER_IS_BETTER) else HIGHER


def _all(findings: Findings) -> Iterable[Measurement]:
    for evaluation in findings.evaluations:
        for metric in evaluation.metrics:
            if metric.value is not None:
                noise = None if metric.stderr is None else _TWO_SIDED_95 * metric.stderr
                name = f"{evaluation.task}.{metric.name}"
                sha256 = evaluation.data.get("sha256") if not evaluation.failed else ""
                source = f"{metric.n} of {sha256}" if sha256 else ""
                is_fraction = metric.unit == FRACTION
                yield Measurement(name, metric.value, noise, direction(name), source, evaluation.doubt, is_fraction)
    for benchmark in findings.benchmarks:
        for row in benchmark.measured:
            doubt = f"{row.failed_requests} requests failed" if row.failed_requests else ""
            values = {column: row.figures.get(name) for column, name in benchmark.table.figures.items()}
            place = f"{benchmark.name}.{row.directory}"
            for name, value in values.items():
                if value is not None and not name.startswith("ci95_"):
                    noise = values.get(f"ci95_{name}")
                    yield Measurement(f"{place}.{name}", value, noise, direction(name), doubt=doubt)
