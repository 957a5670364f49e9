"""Figures of several reports side by side: what has changed, and whether the change is more than noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from evaluation.report.formatting import show_figure, show_percent
from evaluation.report.measurements import Measurement, Report
from evaluation.tasks.metric import HIGHER
from handover.progress import human_bytes

OTHER_SAMPLES, IN_DOUBT = "other samples", "in doubt"


@dataclass(frozen=True)
class Difference:
    """One figure of one report against the first report's.

    Attributes:
        value: the figure in this report; None where it is missing.
        noise: half of its 95% interval; None where unknown, or where the interval is not symmetric.
        change: relative to the first report's; None where one is missing or the first is 0.
        verdict: ``better``, ``worse``, ``noise``, ``equal``, OTHER_SAMPLES or IN_DOUBT; empty where none can be given.
        delta: the difference in the figure's unit; None as for ``change``.
        is_fraction: whether it is shown in percent.
        interval: ends of the 95% interval; None where unknown.
    """

    value: float | None
    noise: float | None
    change: float | None
    verdict: str
    delta: float | None = None
    is_fraction: bool = False
    interval: tuple[float, float] | None = None

    @property
    def change_text(self) -> str:
        """The change for people: of a fraction in percentage points, else in percent; empty where unknown."""
        if self.is_fraction:
            return "" if self.delta is None else f"{100 * self.delta:+.2f} points"
        return "" if self.change is None else f"{100 * self.change:+.1f}%"


def compare(reports: Sequence[Report], patterns: Sequence[str]) -> dict[str, list[Difference]]:
    """Line up the figures that match a pattern and that at least two reports have."""
    names = dict.fromkeys(name for report in reports for name in report.figures)
    wanted = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return {
        name: [difference(reports[0].figures.get(name), report.figures.get(name)) for report in reports]
        for name in wanted
        if sum(name in report.figures for report in reports) > 1
    }


def difference(first: Measurement | None, other: Measurement | None) -> Difference:
    """Judge one figure against the first report's: noise if |b - a| <= sqrt(noise_a^2 + noise_b^2).

    Perplexities are judged by their logarithms. Figures over other samples are not judged, nor those
    that are not comparable.
    """
    if other is None:
        return Difference(None, None, None, "")
    interval, noise = other.interval, None if other.is_logarithmic else other.noise
    if first is None or first is other:
        return Difference(other.value, noise, None, "", None, other.is_fraction, interval)
    change = other.value / first.value - 1 if first.value else None
    delta = other.value - first.value
    return Difference(other.value, noise, change, _judge(first, other), delta, other.is_fraction, interval)


def _judge(first: Measurement, other: Measurement) -> str:
    if first.is_of_other_samples(other):
        return OTHER_SAMPLES
    if not (first.is_comparable and other.is_comparable) or not math.isfinite(first.value + other.value):
        return IN_DOUBT
    if first.value == other.value:
        return "equal"
    if first.noise is None or other.noise is None or not other.better:
        return ""
    if abs(first.distance(other.value)) <= math.hypot(first.noise, other.noise):
        return "noise"
    return "better" if (other.value > first.value) == (other.better == HIGHER) else "worse"


def cell(figure: str, shown: Difference) -> tuple[str, str]:
    """Show a figure for people: its value and interval, and its change and verdict; empty where it is missing."""
    if shown.value is None:
        return "", ""
    if shown.is_fraction:
        interval = "" if shown.noise is None else f" ±{100 * shown.noise:.2f}"
        value = show_percent(shown.value)
    else:
        interval = "" if shown.noise is None else f" ±{show_figure(shown.noise)}"
        if shown.noise is None and shown.interval is not None:
            interval = " ({} to {})".format(*map(show_figure, shown.interval))
        value = human_bytes(shown.value) if figure.endswith("_bytes") else show_figure(shown.value)
    change = shown.verdict if shown.verdict == "equal" else f"{shown.change_text} {shown.verdict}".strip()
    return f"{value}{interval}", change
