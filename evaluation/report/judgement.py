"""A run's figures compared with an earlier run, and checked against the gate's limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from evaluation.report.differences import difference
from evaluation.report.formatting import show_figure, show_percent
from evaluation.report.measurements import Measurement, Report, read_report
from evaluation.report.thresholds import CEILINGS, FLOORS, read_thresholds
from evaluation.tasks.metric import FAILS, HOLDS
from handover.errors import ArtefactError

GO, NO_GO, INCONCLUSIVE = "GO", "NO-GO", "INCONCLUSIVE"
_OF_EVALUATIONS = {HOLDS: GO, FAILS: NO_GO, INCONCLUSIVE: INCONCLUSIVE}
_ABSOLUTE = ("at_least", "at_most")


@dataclass(frozen=True)
class Check:
    """The check of one limit on one figure.

    Attributes:
        figure: name, or the pattern that no figure matches.
        rule: ``at_least 0.45``.
        verdict: GO, NO-GO or INCONCLUSIVE.
        reason: with the numbers.
    """

    figure: str
    rule: str
    verdict: str
    reason: str


@dataclass(frozen=True)
class Judgement:
    """A run's figures with a baseline or checked limits; either may be missing.

    Attributes:
        current: figures of the run.
        baseline: figures of the earlier run; None if no run was named or it has none.
        checks: the check of every limit; empty without thresholds.
        remarks: sentences about what could not be read.
    """

    current: Report
    baseline: Report | None = None
    checks: tuple[Check, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """GO, NO-GO or INCONCLUSIVE; empty without thresholds."""
        return verdict(self.checks) if self.checks else ""

    def against_baseline(self, figure: str) -> tuple[str, str, str]:
        """Show the earlier run's figure, how the figure has changed since, and the verdict of ``difference``.

        What is missing is empty.
        """
        before = None if self.baseline is None else self.baseline.figures.get(figure)
        if before is None:
            return "", "", ""
        shown = show_percent(before.value) if before.is_fraction else show_figure(before.value)
        now = self.current.figures.get(figure)
        if now is None:
            return shown, "", ""
        found = difference(before, now)
        change = found.change_text or f"{now.value - before.value:+.6g}"
        return shown, change + (f", {found.verdict}" if found.verdict else ""), found.verdict


def judge(results: Path, baseline: Path | None, thresholds: Path | None) -> Judgement | None:
    """Compare a run with a baseline and check its limits; None if neither is given or the run has no figures."""
    if baseline is None and thresholds is None:
        return None
    try:
        current = read_report(results)
    except ArtefactError:
        return None
    before, remarks = None, []
    if baseline is not None:
        try:
            before = read_report(baseline)
        except ArtefactError as error:
            remarks.append(f"The baseline cannot be compared with: {error.problem}.")
    limits = {} if thresholds is None else read_thresholds(thresholds)
    return Judgement(current, before, tuple(decide(current, limits, before)), tuple(remarks))


def decide(report: Report, thresholds: Mapping[str, Mapping[str, float]], baseline: Report | None) -> Iterable[Check]:
    """Check every rule on every figure that its pattern matches, and the evaluations' own verdicts.

    A missing figure is inconclusive: a pattern without a match, a failed point, a figure that only the baseline has. A
    report over several models is inconclusive too.
    """
    if len(report.digests) > 1:
        reason = f"the figures belong to {len(report.digests)} models: {', '.join(d[:19] for d in report.digests)}"
        yield Check("model_digest", "one model", INCONCLUSIVE, reason)
    for task, said, reasons in report.verdicts:
        yield Check(task, "verdict", _OF_EVALUATIONS.get(said, NO_GO), f"{said.lower()}: {reasons}")
    for pattern, rules in thresholds.items():
        names = [name for name in report.figures if fnmatchcase(name, pattern)]
        lacking = dict(_lacking(pattern, report, baseline))
        for rule, number in rules.items():
            shown = f"{rule} {number:g}"
            if not names and not lacking:
                yield Check(pattern, shown, INCONCLUSIVE, "the report has no such figure")
            for name, reason in lacking.items():
                yield Check(name, shown, INCONCLUSIVE, reason)
            for name in names:
                base = baseline.figures.get(name) if baseline is not None else None
                yield _check(report.figures[name], shown, rule, number, base)


def _lacking(pattern: str, report: Report, baseline: Report | None) -> Iterable[tuple[str, str]]:
    """Yield the figures that match a pattern and are missing in the report, with the reason."""
    column = pattern.rpartition(".")[2]
    for place, error in report.failures.items():
        if fnmatchcase(f"{place}.{column}", pattern):
            yield f"{place}.{column}", f"the point failed: {error}"
    for name in baseline.figures if baseline is not None else ():
        if fnmatchcase(name, pattern) and name not in report.figures:
            yield name, "the baseline has it, the report has not"


def verdict(checks: Sequence[Check]) -> str:
    """Return NO-GO if any check has it, else INCONCLUSIVE if any has it or there is none, else GO."""
    found = {check.verdict for check in checks}
    return NO_GO if NO_GO in found else INCONCLUSIVE if INCONCLUSIVE in found or not checks else GO


def _check(figure: Measurement, shown: str, rule: str, number: float, base: Measurement | None) -> Check:
    if rule not in _ABSOLUTE and base is None:
        return Check(figure.name, shown, INCONCLUSIVE, "there is no baseline for this figure")
    doubt = figure.doubt or (base.doubt if rule not in _ABSOLUTE and base is not None else "")
    if doubt or not math.isfinite(figure.value):
        return Check(figure.name, shown, INCONCLUSIVE, f"{figure.value:.6g}: {doubt or 'it is not a number'}")
    is_floor = rule in FLOORS
    limit = (FLOORS | CEILINGS)[rule](number, base.value if base is not None else 0.0)
    excess = (limit - figure.value) if is_floor else (figure.value - limit)
    against = "" if rule in _ABSOLUTE or base is None else f" (baseline {base.value:.6g})"
    reason = f"{figure.value:.6g}, limit {limit:.6g}{against}"
    if excess <= 0:
        return Check(figure.name, shown, GO, reason)
    noise = _noise(figure, None if rule in _ABSOLUTE else base)
    if excess <= noise:
        return Check(figure.name, shown, INCONCLUSIVE, f"{reason}: past it by less than the noise of {noise:.3g}")
    return Check(figure.name, shown, NO_GO, reason)


def _noise(figure: Measurement, base: Measurement | None) -> float:
    """Return half of the 95% interval of the compared figures; 0 for two runs over the same samples."""
    if base is not None and figure.source and figure.source == base.source:
        return 0.0
    return math.hypot(figure.noise or 0.0, base.noise or 0.0 if base is not None else 0.0)
