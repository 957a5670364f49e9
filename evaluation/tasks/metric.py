"""Metrics: named figures with standard errors, as tasks compute and reports show them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from evaluation.speed.tables import formulas

FRACTION, PERPLEXITY = "fraction", "perplexity per word"
"""Units that decide how a figure is shown and how wide its interval is."""
LOWER, HIGHER, NEITHER = "lower", "higher", ""
"""Which direction of a figure is better."""
TWO_SIDED_95 = 1.96
"""Standard errors in half of a 95% interval."""
HOLDS, FAILS, INCONCLUSIVE = "HOLDS", "FAILS", "INCONCLUSIVE"
"""Verdicts of an evaluation with limits, such as parity."""


@dataclass(frozen=True)
class Metric:
    """One named figure.

    Attributes:
        name: the name that the figure has in its definition's source.
        value: None if no sample could be scored.
        unit: ``fraction`` (0 to 1), or the unit of the value.
        stderr: standard error in the same unit; None for fewer than two samples, or where it is unknown.
        n: number of samples in the figure.
        failed: number of samples without a score.
        definition: definition in one sentence.
        better: LOWER, HIGHER or NEITHER.
    """

    name: str
    value: float | None
    unit: str
    stderr: float | None
    n: int
    failed: int
    definition: str
    better: str

    @property
    def is_logarithmic(self) -> bool:
        """Whether its error is one of its logarithm: a perplexity is exp of a mean, and far off upwards more easily."""
        return self.unit == PERPLEXITY

    @property
    def noise(self) -> float | None:
        """Half of its 95% interval; of its natural logarithm's where it is logarithmic; None where it is unknown."""
        if self.stderr is None or (self.is_logarithmic and not self.value):
            return None
        return TWO_SIDED_95 * (self.stderr / self.value if self.is_logarithmic and self.value else self.stderr)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Ends of its 95% interval, those of a share within 0 and 1; None where it is unknown."""
        if self.value is None or self.noise is None:
            return None
        low, high = interval(self.value, self.noise, self.is_logarithmic)
        return (max(0.0, low), min(1.0, high)) if self.unit == FRACTION else (low, high)

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def line(self) -> str:
        """Return the metric as a line of a log."""
        if self.value is None:
            return f"{self.name:<28} no sample could be scored"
        scale, sign = (100, "%") if self.unit == FRACTION else (1, "")
        error = "" if self.stderr is None else f" +- {self.stderr * scale:.5g}"
        if self.is_logarithmic and self.interval is not None:
            error = "  (95%: {:.5g} to {:.5g})".format(*self.interval)
        return f"{self.name:<28} {self.value * scale:.5g}{sign}{error}  (n={self.n})"


def interval(value: float, noise: float, is_logarithmic: bool) -> tuple[float, float]:
    """Return the ends of an interval, given half of it (of the value, or of its natural logarithm)."""
    return (value * _exp(-noise), value * _exp(noise)) if is_logarithmic else (value - noise, value + noise)


def _exp(power: float) -> float:
    """Return exp(power), and infinity where no float holds it."""
    try:
        return math.exp(power)
    except OverflowError:
        return math.inf


def share(name: str, scores: Iterable[float | bool | None], definition: str) -> Metric:
    """Compute the mean of scores from 0 to 1 with its standard error; None counts as failed and is left out."""
    given = list(scores)
    known = [float(score) for score in given if score is not None]
    failed = len(given) - len(known)
    centre, error = formulas.mean(known), formulas.standard_error(known)
    return Metric(name, centre, FRACTION, error, len(known), failed, definition, HIGHER)
