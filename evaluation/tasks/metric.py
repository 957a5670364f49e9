"""Metrics: named figures with standard errors, as tasks compute and reports show them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from evaluation.speed import formulas

FRACTION = "fraction"
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
    """

    name: str
    value: float | None
    unit: str
    stderr: float | None
    n: int
    failed: int
    definition: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def line(self) -> str:
        """Return the metric as a line of a log."""
        if self.value is None:
            return f"{self.name:<28} no sample could be scored"
        scale, sign = (100, "%") if self.unit == FRACTION else (1, "")
        error = "" if self.stderr is None else f" +- {self.stderr * scale:.5g}"
        return f"{self.name:<28} {self.value * scale:.5g}{sign}{error}  (n={self.n})"


def share(name: str, scores: Iterable[float | bool | None], definition: str) -> Metric:
    """Compute the mean of scores from 0 to 1 with its standard error; None counts as failed and is left out."""
    given = list(scores)
    known = [float(score) for score in given if score is not None]
    failed = len(given) - len(known)
    return Metric(name, formulas.mean(known), FRACTION, formulas.standard_error(known), len(known), failed, definition)
