"""Whether answers keep up with arrivals: the growth of the requests that are due and have not ended.

A rate above what a server can do shows in its backlog before it shows in latencies, and in some limits (TPOT) it never
does. The backlog is noted at the end of each window. Its growth is the slope of a straight line through the last three
quarters of the measured time; in the first one a load may still be building up. Its 99% interval is Student's, of at
most 16 groups of consecutive windows, with a standard error that the autocorrelation of the residuals makes larger:
a queue that is long remains long for some time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from evaluation.speed.tables.formulas import NANOSECONDS_PER_S
from evaluation.speed.tables.record import Window

BACKLOG_FIGURES = {
    "backlog_growth_per_s": "slope of the number of requests that are due and have not ended, requests/s",
    "backlog_growth_low": "lower end of the 99% interval of that slope",
    "backlog_growth_high": "upper end of it",
}
"""Growth of the backlog at a rate of a search; empty for other points, and where there are too few repeats."""
_COUNTED_SHARE = 0.75
_FEWEST_POINTS, _MOST_POINTS = 6, 16
_LARGEST_CORRELATION = 0.95
_STUDENT_T = (4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977)
"""0.995 quantiles of Student's distribution for 4 to 14 degrees of freedom."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Growth:
    """Growth of the backlog, in requests per second: requests that arrive less those that end.

    Attributes:
        per_s: the slope.
        low, high: its 99% interval.
    """

    per_s: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        """Whether the backlog has grown, with confidence."""
        return self.low > 0

    def is_above(self, per_s: float) -> bool:
        """Whether it has grown by more than so much, with confidence."""
        return self.low > max(0.0, per_s)

    def is_below(self, per_s: float) -> bool:
        """Whether it has not grown, or by less than so much with confidence."""
        return not self.is_significant and self.high <= per_s


def measure_growth(windows: Sequence[Window]) -> Growth | None:
    """Fit the growth to the windows' backlogs; None where there are too few of them."""
    points = _points(windows)
    if len(points) < _FEWEST_POINTS:
        return None
    middle_s, level = fmean(time_s for time_s, _ in points), fmean(backlog for _, backlog in points)
    spread = math.fsum((time_s - middle_s) ** 2 for time_s, _ in points)
    slope = math.fsum((time_s - middle_s) * backlog for time_s, backlog in points) / spread
    residuals = [backlog - level - slope * (time_s - middle_s) for time_s, backlog in points]
    squares, freedom = math.fsum(residual**2 for residual in residuals), len(points) - 2
    error = math.sqrt(squares / freedom / spread * _inflation(residuals, squares))
    half = _STUDENT_T[freedom - (_FEWEST_POINTS - 2)] * error
    return Growth(slope, slope - half, slope + half)


def growth_figures(windows: Sequence[Window]) -> dict[str, float | None]:
    """Return BACKLOG_FIGURES; None where the growth is not known."""
    growth = measure_growth(windows)
    slopes = (None,) * len(BACKLOG_FIGURES) if growth is None else (growth.per_s, growth.low, growth.high)
    return dict(zip(BACKLOG_FIGURES, slopes, strict=True))


def _points(windows: Sequence[Window]) -> list[Point]:
    """Return times in seconds and backlogs, of groups of windows where there are many."""
    if not windows:
        return []
    first_ns, last_ns = windows[0].started_ns, windows[-1].ended_ns
    begin_ns = last_ns - _COUNTED_SHARE * (last_ns - first_ns)
    points = [
        ((window.ended_ns - first_ns) / NANOSECONDS_PER_S, float(window.backlog))
        for window in windows
        if window.backlog is not None and window.ended_ns >= begin_ns
    ]
    if len(points) <= _MOST_POINTS:
        return points
    bounds = [number * len(points) // _MOST_POINTS for number in range(_MOST_POINTS + 1)]
    groups = [points[first:last] for first, last in zip(bounds, bounds[1:], strict=False)]
    return [(fmean(time_s for time_s, _ in group), fmean(backlog for _, backlog in group)) for group in groups]


def _inflation(residuals: Sequence[float], squares: float) -> float:
    """Return by how much correlated residuals make the variance of the slope larger: (1 + r) / (1 - r).

    r is the correlation of neighbours, corrected by (1 + 3 r) / n for what a fit of few points hides of it.
    """
    if squares <= 0:
        return 1.0
    found = math.fsum(one * other for one, other in zip(residuals, residuals[1:], strict=False)) / squares
    corrected = found + (1 + 3 * found) / len(residuals)
    correlation = min(max(corrected, 0.0), _LARGEST_CORRELATION)
    return (1 + correlation) / (1 - correlation)
