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
_ORDER = (NO_GO, INCONCLUSIVE, GO)
_OF_EVALUATIONS = {HOLDS: GO, FAILS: NO_GO, INCONCLUSIVE: INCONCLUSIVE}
_ABSOLUTE = ("at_least", "at_most")
_EXACTNESS = 1e-9
"""Part of the numbers by which a limit may be passed: 0.8 - 0.1 is more than 0.7 in floating point."""


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

    @property
    def worst_first(self) -> list[Check]:
        """The checks: NO-GO, then INCONCLUSIVE, then GO."""
        return sorted(self.checks, key=lambda check: _ORDER.index(check.verdict))

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
    report over several models is inconclusive too, and so is what was left out of the report, by the name before the
    pattern's point.
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
                yield _check(report.figures[name], shown, rule, number, baseline)


def _lacking(pattern: str, report: Report, baseline: Report | None) -> Iterable[tuple[str, str]]:
    """Yield the figures that match a pattern and are missing in the report, with the reason."""
    column = pattern.rpartition(".")[2]
    for place, error in report.failures.items():
        if fnmatchcase(f"{place}.{column}", pattern):
            yield f"{place}.{column}", f"the point failed: {error}"
    for name, reason in report.left_out.items():
        if fnmatchcase(name, pattern.partition(".")[0]):
            yield f"{name}.{pattern.partition('.')[2]}", reason
    for name in baseline.figures if baseline is not None else ():
        if fnmatchcase(name, pattern) and name not in report.figures:
            yield name, "the baseline has it, the report has not"


def verdict(checks: Sequence[Check]) -> str:
    """Return NO-GO if any check has it, else INCONCLUSIVE if any has it or there is none, else GO."""
    found = {check.verdict for check in checks}
    return NO_GO if NO_GO in found else INCONCLUSIVE if INCONCLUSIVE in found or not checks else GO


def _check(figure: Measurement, shown: str, rule: str, number: float, baseline: Report | None) -> Check:
    base = None if rule in _ABSOLUTE or baseline is None else baseline.figures.get(figure.name)
    if doubt := _doubt(figure, base) or ("" if rule in _ABSOLUTE or base else _no_base(figure.name, baseline)):
        return Check(figure.name, shown, INCONCLUSIVE, f"{_shown(figure, figure.value)}: {doubt}")
    limit = (FLOORS | CEILINGS)[rule](number, 0.0 if base is None else base.value)
    against = "" if base is None else f" (baseline {_shown(figure, base.value)})"
    reason = f"{_shown(figure, figure.value)}, limit {_shown(figure, limit)}{against}"
    if base is not None and figure.noise is None and not figure.source:
        reason += "; its noise is not known"
    excess = figure.distance(limit) * (1 if rule in FLOORS else -1)
    exactness = _EXACTNESS * max(map(abs, (figure.value, limit, number, base.value if base else 0.0)))
    if excess <= 0 or abs(figure.value - limit) <= exactness:
        return Check(figure.name, shown, GO, reason)
    noise = _noise(figure, base)
    if excess <= noise:
        above = f"{noise:.3g} of its logarithm" if figure.is_logarithmic else _shown(figure, noise, 3)
        return Check(figure.name, shown, INCONCLUSIVE, f"{reason}: past it by less than the noise of {above}")
    return Check(figure.name, shown, NO_GO, reason)


def _shown(figure: Measurement, number: float, digits: int = 6) -> str:
    """Show a number in the unit that the report shows the figure in."""
    return f"{100 * number:.{digits}g}%" if figure.is_fraction else f"{number:.{digits}g}"


def _doubt(figure: Measurement, base: Measurement | None) -> str:
    """Return why a figure, or what it is compared with, decides nothing; empty if it does."""
    if figure.doubt or not math.isfinite(figure.value):
        return figure.doubt or "it is not a number"
    if base is None:
        return ""
    if base.doubt or not math.isfinite(base.value):
        return f"the baseline is in doubt: {base.doubt or 'it is not a number'}"
    if figure.is_of_other_samples(base):
        return f"other samples: {figure.source[:18]}, the baseline is over {base.source[:18]}"
    return ""


def _no_base(name: str, baseline: Report | None) -> str:
    left_out = {} if baseline is None else baseline.left_out
    reason = next((why for left, why in left_out.items() if name.startswith(f"{left}.")), "")
    return "there is no baseline for this figure" + (f": {reason}" if reason else "")


def _noise(figure: Measurement, base: Measurement | None) -> float:
    """Return half of the 95% interval of the compared figures; 0 for two runs over the same samples."""
    if base is not None and figure.source and figure.source == base.source:
        return 0.0
    return math.hypot(figure.noise or 0.0, (base.noise or 0.0) if base is not None else 0.0)
