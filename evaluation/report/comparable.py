"""Which engines may be compared: those that were shown to serve the same weights.

Where results are of one engine, all of them are comparable, as points of one deployment's sweep are. Where they are of
several engines, a run is comparable with those of other engines only if its own parity evaluation HOLDS: its greedy
continuations and log probabilities are the checkpoint's own within the limits of ``conf/evaluation/parity.yaml`` for
its number formats. Whoever serves something else, or was not asked (no parity, or an inconclusive one), may be faster
because it computes something else. Such a run stands in the report, and is ranked beside runs of its own engine only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from evaluation.report.data import Findings
from evaluation.tasks.metric import FAILS, HOLDS, INCONCLUSIVE

COMPARABLE = ""
"""Name of the group of runs that are compared with each other."""


class Judged(Protocol):
    """What was measured on one engine.

    Attributes:
        engine: ``slipway``, ``fastertransformer``, ``vllm``, ...
        parity: HOLDS, FAILS or INCONCLUSIVE; empty where it was not evaluated.
    """

    @property
    def engine(self) -> str:
        """What served."""

    @property
    def parity(self) -> str:
        """Verdict of its parity evaluation."""


_Judged = TypeVar("_Judged", bound=Judged)


def parity_of(findings: Findings) -> tuple[str, str]:
    """Return a run's verdict and its reasons; both are empty where parity was not evaluated."""
    judged = [each for each in findings.evaluations if each.verdict]
    for verdict in (FAILS, INCONCLUSIVE, HOLDS):
        found = [each for each in judged if each.verdict == verdict]
        if found:
            return verdict, "; ".join(reason for each in found for reason in each.reasons)
    return ("", "") if not judged else (INCONCLUSIVE, "its verdict is unknown")


def engines_of(items: Iterable[Judged]) -> list[str]:
    """List the engines in their order; one that is not known is called ``unknown``."""
    return list(dict.fromkeys(item.engine or "unknown" for item in items))


def group_comparable(items: Sequence[_Judged]) -> dict[str, list[_Judged]]:
    """Put what may be ranked together into one group: COMPARABLE first, then an engine's own by its name."""
    if len(engines_of(items)) < 2:
        return {COMPARABLE: list(items)} if items else {}
    groups: dict[str, list[_Judged]] = {COMPARABLE: []}
    for item in items:
        name = COMPARABLE if item.parity == HOLDS else item.engine or "unknown"
        groups.setdefault(name, []).append(item)
    return {name: group for name, group in groups.items() if group}


def why_not_comparable(parity: str, reasons: str) -> str:
    """Return why a run is not comparable with other engines; empty if it is."""
    if parity == HOLDS:
        return ""
    if not parity:
        return "its parity with the checkpoint was not evaluated"
    said = "fails" if parity == FAILS else "is inconclusive"
    return f"its parity with the checkpoint {said}" + (f" ({reasons})" if reasons else "")
