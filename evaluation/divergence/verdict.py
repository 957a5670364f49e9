"""The verdict: is the served model as near to its source as its number formats allow, and if not, what is the cause?

The limits are measured, not chosen: the same network, streamed out of the same checkpoint in the served number formats,
says on the same texts what rounding alone does. The served model may diverge ``most_ratio`` times as much in the mean,
and ``most_tail_ratio`` times in the 99.9th percentile; another engine rounds in other places, and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evaluation.divergence.figures import TAIL, Divergence, Floats, Interval, bootstrap
from evaluation.divergence.weights import WeightsFound
from evaluation.tasks.metric import FAILS, HOLDS, INCONCLUSIVE

_OfNats = Callable[[Floats], float]
_TAIL = f"{TAIL}th percentile"
Places = npt.NDArray[np.int64]
WEIGHTS, KERNELS, FORMAT, UNKNOWN = "weights", "kernels", "number format", "unknown"
FLOOR, TAIL_FLOOR = 1e-6, 1e-5  # nats, that fp32 in another order makes; see docs/accuracy.md
_MOST_TOLD = 1.05  # bf16's logarithms are rounded
_FLIPS_FLOOR, _ERRORS = 0.001, 3.0  # share of places that are ties, nearly; standard errors of a share


@dataclass(frozen=True)
class Verdict:
    """What is concluded.

    Attributes:
        verdict: HOLDS, FAILS or INCONCLUSIVE.
        reasons: limits that are exceeded; or, where it holds, all figures with their limits.
        cause: WEIGHTS, KERNELS, FORMAT or UNKNOWN where it does not hold; empty where it does.
    """

    verdict: str
    reasons: tuple[str, ...]
    cause: str = ""


def decide(
    served: Divergence, rounding: Divergence, passages: Places, most_ratio: float, most_tail_ratio: float, numbers: str
) -> Verdict:
    """Compare a served model's divergence with that of its number formats.

    Args:
        served: of the served model from the reference.
        rounding: of the reference in the served number formats, from the reference.
        passages: number of each place's passage.
        most_ratio: see the module.
        most_tail_ratio: see the module.
        numbers: what the formats are called.
    """
    if bad := int((~np.isfinite(served.served)).sum()):
        return Verdict(FAILS, (f"{bad} of {len(passages)} log probabilities are not finite numbers",))
    if bad := int((~(served.told <= _MOST_TOLD)).sum()):
        where = f"in {bad} of {len(passages)} places"
        return Verdict(FAILS, (f"{where} what is told is no probability, or more than 1 in sum: logits, perhaps",))

    def ratio_of(figure: _OfNats, floor: float) -> Interval:
        return bootstrap(lambda at: figure(served.kl[at]) / (figure(rounding.kl[at]) + floor), passages)

    broken, shown, doubts = list[str](), list[str](), list[str]()
    for name, figure, floor, limit in (("mean", _mean, FLOOR, most_ratio), (_TAIL, _tail, TAIL_FLOOR, most_tail_ratio)):
        found = ratio_of(figure, floor)
        line = (
            f"KL's {name} is {figure(served.kl):.3g} nats, {found.value:.3g} times that of {numbers} alone"
            f" ({found.low:.3g} to {found.high:.3g}), limit {limit:g}"
        )
        straddles = figure is _mean and found.high > limit
        (broken if found.low > limit else doubts if straddles else shown).append(line)
    flips, usual = float(served.flips.mean()), float(rounding.flips.mean())
    noise = _ERRORS * (max(usual, 1 / len(passages)) / len(passages)) ** 0.5
    most = most_ratio * usual + noise + _FLIPS_FLOOR
    line = f"{flips:.3%} of the most probable tokens differ, {usual:.3%} by {numbers} alone, limit {most:.3%}"
    (broken if flips > most else shown).append(line)
    if broken:
        return Verdict(FAILS, tuple(broken))
    if doubts:
        return Verdict(INCONCLUSIVE, (*doubts, "give more passages: evaluation.divergence.samples"))
    return Verdict(HOLDS, tuple(shown))


def conclude(verdict: Verdict, weights: WeightsFound, engine: str) -> Verdict:
    """Add what is known of the weights: others fail whatever they do to these texts, sound ones leave the kernels."""
    reasons = verdict.reasons if verdict.verdict != HOLDS or weights.are_sound is not False else ()
    if weights.are_sound is False:
        return Verdict(FAILS, (*reasons, f"the cause is the weights: {weights.evidence}"), WEIGHTS)
    if verdict.verdict != FAILS:
        return replace(verdict, reasons=(*reasons, weights.evidence))
    if weights.are_sound is None:
        return replace(verdict, reasons=(*reasons, f"weights or kernels: {weights.evidence}"), cause=UNKNOWN)
    said = f"the cause is what {engine or 'the server'} computes: {weights.evidence}"
    return replace(verdict, reasons=(*reasons, said), cause=KERNELS)


def _mean(kl: Floats) -> float:
    return float(kl.mean())


def _tail(kl: Floats) -> float:
    return float(np.percentile(kl, TAIL))
