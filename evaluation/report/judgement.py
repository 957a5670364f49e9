"""What a run's figures are held against: an earlier run, and the gate's limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evaluation.compare import Difference, difference
from evaluation.gate import Check, decide, verdict
from evaluation.report.formatting import show_figure
from evaluation.report.measurements import Measurement, Report, read_report
from evaluation.report.thresholds import read_thresholds
from handover.errors import ArtefactError


@dataclass(frozen=True)
class Judgement:
    """Read for the report; either part may be missing.

    Attributes:
        current: the run's own figures.
        baseline: the earlier run's; None if none was named or it holds none.
        checks: every limit, decided; empty without thresholds.
        remarks: what could not be read.
    """

    current: Report
    baseline: Report | None = None
    checks: tuple[Check, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """GO, NO-GO or INCONCLUSIVE; empty without thresholds."""
        return verdict(self.checks) if self.checks else ""

    def before(self, figure: str) -> Measurement | None:
        """The earlier run's figure; None where it has none."""
        return None if self.baseline is None else self.baseline.figures.get(figure)

    def change(self, figure: str, is_fraction: bool) -> tuple[str, str]:
        """Say how a figure has changed, shares in points; and the verdict: better, worse, noise, equal or nothing."""
        before, now = self.before(figure), self.current.figures.get(figure)
        if before is None or now is None:
            return "", ""
        found: Difference = difference(before, now)
        if is_fraction:
            text = f"{100 * (now.value - before.value):+.2f} points"
        else:
            text = f"{now.value - before.value:+.6g}" if found.change is None else f"{100 * found.change:+.1f}%"
        return text + (f", {found.verdict}" if found.verdict else ""), found.verdict

    def shown_before(self, figure: str, is_fraction: bool) -> str:
        """The earlier run's figure as text; what is missing is empty."""
        before = self.before(figure)
        if before is None:
            return ""
        return f"{100 * before.value:.2f}%" if is_fraction else show_figure(before.value)


def judge(results: Path, baseline: Path | None, thresholds: Path | None) -> Judgement | None:
    """Hold a run against what is given; None if nothing is, or if the run left no figures."""
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
