"""What passages showed: reasons, doubts, figures, and what was not looked at."""

from __future__ import annotations

from dataclasses import dataclass

from evaluation.parity.scales import Scale
from evaluation.tasks.metric import Metric


@dataclass(frozen=True)
class PassageFindings:
    """What passages showed.

    Attributes:
        broken: why the model is not its source; empty where it may be.
        doubts: what could not be told.
        shown: figures in words.
        notes: what was not looked at.
        metrics: figures.
        scales: of every tensor; empty where none was found.
    """

    broken: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    scales: tuple[Scale, ...] = ()


def joined(first: PassageFindings, second: PassageFindings) -> PassageFindings:
    """Put both together."""
    return PassageFindings(
        first.broken + second.broken,
        first.doubts + second.doubts,
        first.shown + second.shown,
        first.notes + second.notes,
        first.metrics + second.metrics,
        first.scales + second.scales,
    )
