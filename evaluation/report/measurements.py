"""Every figure of a run by name, with its noise, for comparisons and for the gate.

Names are ``<task>.<figure>`` for accuracy, ``<benchmark>.<input>-<output>_batch<n>.<column>`` for a static sweep and
``<benchmark>.<lengths>_concurrency<n>.<column>`` (or ``_rate<r>``) for a load; the highest rate that a search found is
``<benchmark>.<lengths>_search.rate_per_s``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.report.benchmarks import Benchmark
from evaluation.report.data import Findings, collect_findings
from evaluation.report.directions import MAY_BE_NEGATIVE, direction
from evaluation.speed.tables.cells import name_of_file
from evaluation.speed.tables.row import STATIC, VALID, Row
from evaluation.tasks.metric import FRACTION, interval
from handover.errors import ArtefactError

COUNTED = ("failed_requests", "cancelled_requests", "is_stable", "validity")
"""What a row says of itself, as figures: ``is_stable`` and ``validity`` are 1 or 0."""


@dataclass(frozen=True)
class Measurement:
    """One figure.

    Attributes:
        name: name as the module's description defines it.
        value: value in the unit that the name ends with.
        noise: half of its 95% confidence interval, or of that of its natural logarithm; None if unknown.
        better: ``lower``, ``higher``, or empty where neither is better.
        source: digest and number of samples of the data for accuracy; empty for a benchmark.
        doubt: why the value is not reliable; empty if it is.
        is_fraction: whether it is shown in percent.
        is_comparable: whether a run's difference from another may be called better or worse. Random weights are as fast
            as trained ones, but what failed or piled up was not answered.
        is_logarithmic: whether ``noise`` is one of the logarithm, as of a perplexity, and differences are taken there.
    """

    name: str
    value: float
    noise: float | None
    better: str
    source: str = ""
    doubt: str = ""
    is_fraction: bool = False
    is_logarithmic: bool = False
    is_comparable: bool = True

    @property
    def interval(self) -> tuple[float, float] | None:
        """Ends of its 95% interval; None where it is unknown."""
        return None if self.noise is None else interval(self.value, self.noise, self.is_logarithmic)

    def distance(self, other: float) -> float:
        """Return how far a value lies above this figure, on the scale of ``noise``; infinite where it has no place."""
        if not self.is_logarithmic:
            return other - self.value
        return math.log(other / self.value) if other > 0 and self.value > 0 else math.copysign(math.inf, other)

    def is_of_other_samples(self, other: Measurement) -> bool:
        """Whether both are figures of an evaluation over samples that are not the same ones."""
        return bool(self.source and other.source and self.source != other.source)


@dataclass(frozen=True)
class Report:
    """A run's figures.

    Attributes:
        name: name of the results directory.
        digests: digests of the measured models, and of the repository in the results directory.
        machines: machines that measured.
        failures: points that could not be measured, with the reason.
        verdicts: name, verdict and reasons of each evaluation that has limits of its own.
        left_out: why the figures of an evaluation or a benchmark were left out, by its name.
    """

    name: str
    figures: Mapping[str, Measurement]
    digests: tuple[str, ...]
    machines: tuple[str, ...]
    remarks: tuple[str, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    verdicts: tuple[tuple[str, str, str], ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


def read_report(results: Path) -> Report:
    """Read a run's results directory.

    Raises:
        ArtefactError: nothing was measured there.
    """
    findings = collect_findings(results, results.name, results / "logs" / "stages.json")
    figures = {figure.name: figure for figure in _all(findings)}
    if not (figures or findings.left_out or any(benchmark.failed for benchmark in findings.benchmarks)):
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
        verdicts=tuple((e.name, e.verdict, "; ".join(e.reasons)) for e in findings.evaluations if e.verdict),
        left_out=findings.left_out,
    )


def _all(findings: Findings) -> Iterable[Measurement]:
    for evaluation in findings.evaluations:
        sha256 = evaluation.data.get("sha256") if not evaluation.failed else ""
        for metric in evaluation.metrics:
            if metric.value is not None:
                yield Measurement(
                    f"{evaluation.name}.{metric.name}",
                    metric.value,
                    metric.noise,
                    metric.better,
                    source=f"{metric.n} of {sha256}" if sha256 else "",
                    doubt=evaluation.doubt,
                    is_fraction=metric.unit == FRACTION,
                    is_logarithmic=metric.is_logarithmic,
                    is_comparable=not evaluation.doubt,
                )
    for benchmark in findings.benchmarks:
        for row in benchmark.measured:
            yield from _figures_of(benchmark, row)
        yield from _found_rates(benchmark)


def _figures_of(benchmark: Benchmark, row: Row) -> Iterable[Measurement]:
    """Yield a row's figures; those of a row that is not VALID are in doubt, and what it counts is not."""
    place = f"{benchmark.name}.{row.directory}"
    doubt = row.validity_reasons or ("" if benchmark.finished else "the benchmark did not finish")
    values = {column: row.figures.get(name) for column, name in benchmark.table.figures.items()}
    for name, value in values.items():
        if value is not None and not name.startswith("ci95_"):
            is_wrong = value < 0 and not MAY_BE_NEGATIVE.fullmatch(name)
            why = "it is negative: that was not measured" if is_wrong else doubt
            noise, is_comparable = values.get(f"ci95_{name}"), not (is_wrong or row.has_lost_answers)
            yield Measurement(f"{place}.{name}", value, noise, direction(name), doubt=why, is_comparable=is_comparable)
    for name in COUNTED:
        if (count := row.value(name)) is not None and not (name == "is_stable" and row.mode == STATIC):
            value = float(count == VALID) if name == "validity" else float(count)
            yield Measurement(f"{place}.{name}", value, None, direction(name))


def _found_rates(benchmark: Benchmark) -> Iterable[Measurement]:
    """Yield the highest rate of each search; where none holds, 0. The truth may be as high as what is exceeded."""
    for found in benchmark.found:
        rate, exceeded = found["rate_per_s"] or 0.0, found["exceeded_at_per_s"]
        doubt = "" if benchmark.finished else "the benchmark did not finish"
        if rate:
            doubt = found.get("validity_reasons") or doubt
        elif found.get("failed") or found.get("undecided"):
            doubt = "none holds, but rates failed or were not decided"
        noise = None if exceeded is None else max(0.0, exceeded - rate)
        name = f"{benchmark.name}.{name_of_file(found['workload'])}_search.rate_per_s"
        yield Measurement(name, rate, noise, direction("rate_per_s"), doubt=doubt)
