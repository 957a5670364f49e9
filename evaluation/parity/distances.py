"""Differences of passages' log probabilities between the served model and its source, and their limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from evaluation.parity.passages import Passages, Scores
from evaluation.parity.scales import Scale
from evaluation.tasks.metric import LOWER, Metric

_RMS_FACTOR, _MOST_FACTOR = 2.0, 4.0  # of the differences that rounded arithmetic causes
_RMS_FLOOR, _MOST_FLOOR = 0.002, 0.02  # nats
_FP32_FLOORS = 0.1  # part of these: sums are not exact in fp32 either, but a sound model is off by 3e-6


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
    names = [each.name for each in fields(PassageFindings)]
    return PassageFindings(*(getattr(first, name) + getattr(second, name) for name in names))


def compare_plainly(
    log_probs: Callable[[Passages], Scores],
    passages: tuple[Passages, Passages],
    served: tuple[Scores, Scores],
    most: float,
    doubts: tuple[str, ...],
) -> PassageFindings:
    """Compare passages with a source in other number formats, with one limit for every token.

    Args:
        log_probs: computes the source's log probabilities.
        passages: passages of both kinds; see ``Twin.compare``.
        served: the server's log probabilities of these passages.
        most: the limit in nats.
        doubts: what this comparison cannot show.
    """
    residuals = np.concatenate([(s - log_probs(p)).ravel() for p, s in zip(passages, served, strict=True)])
    largest = float(np.abs(residuals).max()) if np.isfinite(residuals).all() else math.inf
    line = f"passage_log_prob_difference up to {largest:.4g}, limit {most:g}"
    metric = _metric("passage_log_prob_difference", rms(residuals), residuals.size, "their source")
    return PassageFindings((line,) if largest > most else (), doubts, (line,), metrics=(metric,))


def distances(residuals: list[Scores], rounding: list[Scores], extra_rms: float, data_type: str) -> PassageFindings:
    """Compare differences with those that arithmetic rounded to a data type causes."""
    floors = _FP32_FLOORS if data_type == "fp32" else 1.0
    broken: list[str] = []
    shown: list[str] = []
    found, expected = (np.concatenate([each.ravel() for each in parts]) for parts in (residuals, rounding))
    noise = math.hypot(rms(expected), extra_rms)
    ratio = noise / max(rms(expected), 1e-12) if extra_rms else 1.0
    rms_limit = max(_RMS_FACTOR * noise, floors * _RMS_FLOOR)
    most_limit = max(_MOST_FACTOR * ratio * float(np.abs(expected).max()), floors * _MOST_FLOOR)
    most = float(np.abs(found).max())
    for name, value, limit, where in (
        ("passage_log_prob_difference", rms(found), rms_limit, ""),
        ("the largest of these", most, most_limit, f" ({_place(residuals)})"),
    ):
        (broken if value > limit else shown).append(f"{name} {value:.4g}{where}, limit {limit:.4g}")
    metrics = (
        _metric("passage_log_prob_difference", rms(found), found.size, "the source in the same number formats"),
        _metric("passage_rounding", noise, found.size, "that source with rounded arithmetic: what is to be expected"),
    )
    return PassageFindings(tuple(broken), shown=tuple(shown), metrics=metrics)


def _place(residuals: list[Scores]) -> str:
    """Return the position of the largest difference in words."""
    kind = max(range(len(residuals)), key=lambda each: np.abs(residuals[each]).max())
    row, place = np.unravel_index(np.abs(residuals[kind]).argmax(), residuals[kind].shape)
    return f"{('passage', 'long passage')[kind]} {row}, scored token {place}"


def _metric(name: str, value: float, n: int, against: str) -> Metric:
    definition = f"root mean square difference of log probabilities of passages' tokens, against {against}"
    return Metric(name, value if math.isfinite(value) else None, "nats", None, n, 0, definition, LOWER)


def rms(numbers: Scores) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(numbers**2)))
