"""The result of comparing passages: reasons, doubts, figures, and notes on what was not compared."""

from __future__ import annotations

from dataclasses import dataclass

from evaluation.parity.scales import Scale
from evaluation.tasks.metric import Metric


@dataclass(frozen=True)
class PassageFindings:
    """The result of comparing passages.

    Attributes:
        broken: why the model differs from its source; empty if no difference was found.
        doubts: what the comparison could not decide.
        shown: figures in words.
        notes: what was not compared.
        metrics: figures.
        scales: the scale of every tensor; empty where none was computed.
    """

    broken: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    scales: tuple[Scale, ...] = ()


def joined(first: PassageFindings, second: PassageFindings) -> PassageFindings:
    """Join two results."""
    return PassageFindings(
        first.broken + second.broken,
        first.doubts + second.doubts,
        first.shown + second.shown,
        first.notes + second.notes,
        first.metrics + second.metrics,
        first.scales + second.scales,
    )
