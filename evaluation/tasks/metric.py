"""An accuracy figure by its name, as every task reports it and every report shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from evaluation.speed import formulas

FRACTION = "fraction"
HOLDS, FAILS, INCONCLUSIVE = "HOLDS", "FAILS", "INCONCLUSIVE"
"""Verdicts of an evaluation that has limits of its own."""


@dataclass(frozen=True)
class Metric:
    """A figure by its name.

    Attributes:
        name: as the figure's source calls it.
        value: None if no sample could be scored.
        unit: ``fraction`` (0 to 1), or what the value counts.
        stderr: standard error in the same unit; None below two samples, or where it is not known.
        n: samples it rests on.
        failed: samples that are missing from it.
        definition: in one sentence.
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
        """Say it in one line of a log."""
        if self.value is None:
            return f"{self.name:<28} no sample could be scored"
        scale, sign = (100, "%") if self.unit == FRACTION else (1, "")
        error = "" if self.stderr is None else f" +- {self.stderr * scale:.5g}"
        return f"{self.name:<28} {self.value * scale:.5g}{sign}{error}  (n={self.n})"


def share(name: str, scores: Iterable[float | bool | None], definition: str) -> Metric:
    """Mean of scores from 0 to 1 with its standard error; a None counts as failed and in no mean."""
    given = list(scores)
    known = [float(score) for score in given if score is not None]
    failed = len(given) - len(known)
    return Metric(name, formulas.mean(known), FRACTION, formulas.standard_error(known), len(known), failed, definition)
