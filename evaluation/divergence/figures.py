"""Kullback-Leibler divergences of places, and their figures with bootstrap intervals. No input, no output, no torch.

Of a place the reference knows its most probable tokens P, and the served model tells some of its own, Q, and the given
token's. Tokens that both know count one by one; all others count as one token, with what is left of the mass on either
side. By the log-sum inequality that is a lower bound of KL(P || Q), and exact where all tokens are told. How much of
the reference's mass is in the rest is a figure of its own; an upper bound does not exist, because a token that is not
told may have any small probability.

Two distances that are bounded have both bounds, whatever is not told. Either is a sum over tokens of a convex function
f(p, q) with f(cp, cq) = c f(p, q): |p - q| / 2 for the total variation, half of p log(p / m) + q log(q / m) with
m = (p + q) / 2 for the Jensen-Shannon divergence. So for a rest of P' and Q' it is at least f(P', Q'), all tokens being
alike, and at most f(P', 0) + f(0, Q'), no token having both: (P' + Q') / 2, times log 2 of the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evaluation.divergence.streamed import Scores
from evaluation.tasks.metric import FRACTION, LOWER, NEITHER, Metric

Floats = npt.NDArray[np.float64]
_ROWS = 2048  # places that are compared at once
_ROUNDING = 1e-6  # of a sum of probabilities that were told as fp32 logarithms
_RESAMPLES, _SEED = 400, 29
_NATS, _PERPLEXITY = "nats", "perplexity per token"
TAIL = 99.9


@dataclass(frozen=True)
class Divergence:
    """What a model's scores differ in from a reference's, by place.

    Attributes:
        kl: float64 [N], in nats; see the module.
        rest: float64 [N], the reference's probability of all tokens that count as one.
        variation, jensen_shannon: float64 [N, 2], the least and the most that the distances can be.
        flips: bool [N], whether the two prefer different tokens.
        told: float64 [N], sum of the probabilities that the served model tells, which is no more than 1.
        reference, served: float64 [N], log probability of the given token.
    """

    kl: Floats
    rest: Floats
    variation: Floats
    jensen_shannon: Floats
    told: Floats
    flips: npt.NDArray[np.bool_]
    reference: Floats
    served: Floats


def compare(reference: Scores, served: Scores, tokens: npt.NDArray[np.int64]) -> Divergence:
    """Compare scores place by place.

    Args:
        reference: of the source.
        served: of the other model; of the most probable tokens it may have told none.
        tokens: [N], that were scored.
    """
    parts = [slice(begin, begin + _ROWS) for begin in range(0, len(tokens), _ROWS)]
    columns = zip(*(_distances(reference, served, tokens, part) for part in parts), strict=True)
    flips = reference.top_ids[:, 0] != served.top_ids[:, 0]
    kl, rest, variation, jensen_shannon, told = map(np.concatenate, columns)
    log_probs = reference.log_probs.astype(float), served.log_probs.astype(float)
    return Divergence(kl, rest, variation, jensen_shannon, told, flips, *log_probs)


def _distances(reference: Scores, served: Scores, tokens: npt.NDArray[np.int64], part: slice) -> tuple[Floats, ...]:
    """Compute the first five fields of ``Divergence`` for some places."""
    own = tokens[part, None]
    ids = np.concatenate((served.top_ids[part], own), 1)
    theirs = np.concatenate((served.top[part], served.log_probs[part, None]), 1).astype(float)
    in_top = (served.top_ids[part] >= 0) & ~np.isneginf(served.top[part])
    is_told = np.concatenate((in_top, ~((served.top_ids[part] == own) & in_top).any(1, keepdims=True)), 1)
    same = ids[:, :, None] == reference.top_ids[part, None, :]
    ours = np.take_along_axis(reference.top[part], same.argmax(2), 1).astype(float)
    ours[:, -1] = reference.log_probs[part]
    is_known = same.any(2)
    is_known[:, -1] = True
    with np.errstate(over="ignore"):
        told = np.exp(np.where(is_told, theirs, -np.inf)).sum(1)
    common = is_told & is_known & np.isfinite(theirs)
    p, q = np.exp(ours) * common, np.exp(theirs) * common
    p_rest, q_rest = np.maximum(0, 1 - p.sum(1)), np.maximum(0, 1 - q.sum(1))
    shared = (p * np.subtract(ours, theirs, out=np.zeros_like(ours), where=common)).sum(1)
    ratio = np.maximum(p_rest, _ROUNDING) / np.maximum(q_rest, _ROUNDING)
    left = np.where(p_rest > _ROUNDING, p_rest * np.log(ratio), 0)
    bounds = (_bounds(f, p, q, p_rest, q_rest) for f in (_variation, _jensen_shannon))
    return (np.maximum(0, shared + left), p_rest, *bounds, told)


def _bounds(f: Callable[[Floats, Floats], Floats], p: Floats, q: Floats, p_rest: Floats, q_rest: Floats) -> Floats:
    """Compute the least and the most that a sum of f over all tokens can be; see the module."""
    nothing = np.zeros_like(p_rest)
    rests = f(p_rest, q_rest), f(p_rest, nothing) + f(nothing, q_rest)
    found: Floats = f(p, q).sum(1)[:, None] + np.stack(rests, 1)
    return found


def _variation(p: Floats, q: Floats) -> Floats:
    found: Floats = np.abs(p - q) / 2
    return found


def _jensen_shannon(p: Floats, q: Floats) -> Floats:
    halves = np.zeros_like(p)
    for each in (p, q):
        halves += each * np.log(np.divide(2 * each, p + q, out=np.ones_like(p), where=each > 0))
    return halves / 2


@dataclass(frozen=True)
class Interval:
    """A figure with its interval.

    Attributes:
        value: over all places.
        low, high: ends of the 95% interval of passages drawn again; both are the value with fewer than two passages.
        stderr: standard deviation over these draws; None with fewer than two passages.
    """

    value: float
    low: float
    high: float
    stderr: float | None


def bootstrap(of: Callable[[npt.NDArray[np.int64]], float], passages: npt.NDArray[np.int64]) -> Interval:
    """Compute a figure of places, and again of passages drawn with replacement: places of one passage are no draws.

    Args:
        of: the figure, of the indices of places.
        passages: int64 [N], number of each place's passage, from 0, ascending.
    """
    bounds = np.searchsorted(passages, np.arange(passages[-1] + 2))
    value, count = of(np.arange(len(passages))), len(bounds) - 1
    if count < 2:
        return Interval(value, value, value, None)
    rng, places = np.random.default_rng(_SEED), [np.arange(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
    draws = [of(np.concatenate([places[n] for n in rng.integers(0, count, count)])) for _ in range(_RESAMPLES)]
    low, high = np.percentile(draws, (2.5, 97.5))
    return Interval(value, float(low), float(high), float(np.std(draws)))


@dataclass(frozen=True)
class _Figure:
    of: Callable[[Divergence, npt.NDArray[np.int64]], float]
    unit: str
    definition: str
    better: str = LOWER


FIGURES: dict[str, _Figure] = {
    "mean_kl": _Figure(lambda d, at: d.kl[at].mean(), _NATS, "mean of KL(source || served) over places, from below"),
    "median_kl": _Figure(lambda d, at: np.median(d.kl[at]), _NATS, "its median"),
    "kl_99_9": _Figure(lambda d, at: np.percentile(d.kl[at], TAIL), _NATS, "its 99.9th percentile"),
    "max_kl": _Figure(lambda d, at: d.kl[at].max(), _NATS, "its maximum"),
    "least_variation": _Figure(
        lambda d, at: d.variation[at, 0].mean(), FRACTION, "mean total variation distance of the two, from below"
    ),
    "most_variation": _Figure(lambda d, at: d.variation[at, 1].mean(), FRACTION, "the same from above"),
    "least_jensen_shannon": _Figure(
        lambda d, at: d.jensen_shannon[at, 0].mean(), _NATS, "mean Jensen-Shannon divergence of the two, from below"
    ),
    "most_jensen_shannon": _Figure(lambda d, at: d.jensen_shannon[at, 1].mean(), _NATS, "the same from above"),
    "top1_flips": _Figure(lambda d, at: d.flips[at].mean(), FRACTION, "places where the two prefer different tokens"),
    "untold_mass": _Figure(
        lambda d, at: d.rest[at].mean(), FRACTION, "the source's probability of tokens that count as one, mean", NEITHER
    ),
    "mean_log_prob_change": _Figure(
        lambda d, at: (d.served - d.reference)[at].mean(), _NATS, "served less source, of the given tokens", NEITHER
    ),
    "rms_log_prob_difference": _Figure(
        lambda d, at: ((d.served - d.reference)[at] ** 2).mean() ** 0.5, _NATS, "root mean square of these differences"
    ),
    "perplexity": _Figure(lambda d, at: np.exp(-d.served[at].mean()), _PERPLEXITY, "of the served model"),
    "source_perplexity": _Figure(
        lambda d, at: np.exp(-d.reference[at].mean()), _PERPLEXITY, "of the source, of the same texts", NEITHER
    ),
}


def intervals(found: Divergence, passages: npt.NDArray[np.int64]) -> dict[str, Interval]:
    """Compute every figure, by name."""
    return {
        name: bootstrap(lambda at, of=figure.of: float(of(found, at)), passages)  # type: ignore[misc]
        for name, figure in FIGURES.items()
    }


def metrics(found: dict[str, Interval], places: int) -> list[Metric]:
    """Return figures as reports and gates take them."""
    return [
        Metric(
            name, each.value, FIGURES[name].unit, each.stderr, places, 0, FIGURES[name].definition, FIGURES[name].better
        )
        for name, each in found.items()
    ]


def by_groups(found: Divergence, groups: npt.NDArray[np.int64], name: str) -> list[dict[str, float]]:
    """Compute the figures of places of one group each, in ascending order; a row each, its first column the group."""
    wanted = ("mean_kl", "median_kl", "kl_99_9", "max_kl", "top1_flips", "perplexity", "source_perplexity")
    rows = []
    for group in np.unique(groups):
        at = np.flatnonzero(groups == group)
        figures = {each: float(FIGURES[each].of(found, at)) for each in wanted}
        rows.append({name: int(group), "places": len(at), **figures})
    return rows


def octave(positions: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the power of two at or below each position, from 1."""
    return np.asarray(2 ** np.floor(np.log2(np.asarray(positions))), np.int64)
