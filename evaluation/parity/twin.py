"""The served model against its source in the same number formats, over passages: how far, and is any tensor scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from evaluation.figures import Metric
from evaluation.parity.formats import Formats, quantise_head, quantise_layers, round_weights, rounded_arithmetic
from evaluation.parity.passages import Passages, Scores
from evaluation.parity.scales import Scale, Scales, scaled_by, suspects

_T = TypeVar("_T")
Both = tuple[_T, _T]
LEAST_Z = 7.0  # of a sound model the largest of a hundred tensors has 3 to 4, see docs/measuring.md
_ROWS = 8  # passages that are computed at once
_CANDIDATES, _STEP = 6, 0.01
_RMS_FACTOR, _MOST_FACTOR = 2.0, 4.0  # of what rounded arithmetic makes
_RMS_FLOOR, _MOST_FLOOR = 0.002, 0.02  # nats; sums are not exact in fp32 either


@dataclass(frozen=True)
class Findings:
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


class Twin:
    """The source as the served model should hold it.

    Args:
        model: of transformers, in fp32; its weights are rounded in place.
        is_t5: it is an encoder-decoder.
        formats: of the served model.
        is_ours: whether the drop-in engine serves it, whose int8 is known; another may round otherwise.
    """

    def __init__(self, model: Any, is_t5: bool, formats: Formats, is_ours: bool) -> None:
        self._model, self._is_t5, self._formats, self._is_ours = model.requires_grad_(False), is_t5, formats, is_ours
        round_weights(model, formats)

    def compare(self, passages: Both[Passages], served: Both[Scores], resolution: float) -> Findings:
        """Compare scores of passages to average over, and of those that visit every position.

        Args:
            passages: both kinds.
            served: what the server made of them.
            resolution: error of a norm's scale that has to be seen.
        """
        if not all(np.isfinite(scores).all() for scores in served):
            return Findings(("log probabilities of passages are not finite numbers",))
        extra_rms = self._quantise(passages[0], served[0])
        ours = [self._scores(each) for each in passages]
        with rounded_arithmetic(self._model, self._formats.data_type):
            rounding = [self._scores(each) - own for each, own in zip(passages, ours, strict=True)]
        residuals = [theirs - own for theirs, own in zip(served, ours, strict=True)]
        distance = _distances(residuals, rounding, extra_rms)
        sums = Scales(self._model)
        for part, rows in _parts(passages[0]):
            sums.add(lambda part=part: self._log_probs(part), residuals[0][rows])  # type: ignore[misc]
        return _joined(distance, self._judge(sums.found(), passages[0], ours[0], residuals[0], resolution))

    def _quantise(self, passages: Passages, served: Scores) -> float:
        """Round matrices as int8_mode 1 does, the head as well if that comes closer (a GPU's is, a CPU's is not).

        Returns:
            What another engine's way of rounding them may add, root mean square in nats.
        """
        if not self._formats.is_int8:
            return 0.0
        plain = self._scores(passages)
        quantise_layers(self._model)
        ours = self._scores(passages)
        extra = 0.0 if self._is_ours else 2**0.5 * _rms(ours - plain)
        head = self._model.get_output_embeddings()
        kept = head.weight
        quantise_head(self._model)
        if _rms(served - self._scores(passages)) > _rms(served - ours):
            head.weight = kept
        return extra

    def _judge(
        self, scales: list[Scale], passages: Passages, ours: Scores, residuals: Scores, resolution: float
    ) -> Findings:
        norms = [scale for scale in scales if scale.is_norm and math.isfinite(scale.standard_error)]
        seen = max((LEAST_Z * norm.standard_error for norm in norms), default=math.inf)
        metric = Metric(
            "norm_scale_resolution",
            seen if norms else None,
            "fraction",
            None,
            len(residuals),
            0,
            "error of a norm's scale that passages would show, of the norm that shows it least",
        )
        found = Findings(metrics=(metric,), scales=tuple(scales))
        if suspected := suspects(scales, LEAST_Z, resolution / 4)[:_CANDIDATES]:
            return replace(found, broken=(self._name(suspected, passages, ours, residuals),))
        if seen > resolution:
            most = math.ceil(len(residuals) * (seen / resolution) ** 2)
            wanted = f"give evaluation.parity.passages={most}" if norms else "no norm was found"
            return replace(found, doubts=(f"a norm's scale could be off by {seen:.2g} unseen: {wanted}",))
        return replace(found, shown=(f"every norm's scale is its source's, to {seen:.2g}",))

    def _name(self, suspected: list[Scale], passages: Passages, ours: Scores, residuals: Scores) -> str:
        """Find the one tensor whose scale explains most, by computing what each candidate would do."""
        best, most, error = suspected[0], -1.0, 0.0
        for scale in suspected:
            with scaled_by(self._model, scale.tensor, _STEP):
                direction = (self._scores(passages) - ours) / _STEP
            square = float((direction**2).sum()) or math.inf
            share = float((direction * residuals).sum()) ** 2 / square / float((residuals**2).sum())
            if share > most:
                best, most, error = scale, share, float((direction * residuals).sum()) / square
        return (
            f"the differences are as if {best.tensor} were {1 + error:.3f} times its source ({abs(best.z):.1f} standard"
            f" errors; that explains {most:.0%} of their square)"
        )

    @torch.inference_mode()
    def _scores(self, passages: Passages) -> Scores:
        return np.concatenate([self._log_probs(part).double().numpy() for part, _ in _parts(passages)])

    def _log_probs(self, passages: Passages) -> Tensor:
        tokens = torch.from_numpy(passages.tokens)
        if self._is_t5:
            start = torch.full_like(tokens[:, :1], self._model.config.decoder_start_token_id)
            begun, source = torch.cat([start, tokens[:, :-1]], 1), torch.from_numpy(passages.source)
            logits = self._model(input_ids=source, decoder_input_ids=begun, use_cache=False).logits.float()
        else:
            logits = self._model(tokens, use_cache=False).logits[:, :-1].float()
            tokens = tokens[:, 1:]
        log_probs: Tensor = logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(-1)
        return log_probs


def compare_plainly(
    log_probs: Callable[[Passages], Scores],
    passages: Both[Passages],
    served: Both[Scores],
    most: float,
    doubts: tuple[str, ...],
) -> Findings:
    """Hold passages against a source that is in other number formats, by a limit for any one token.

    Args:
        log_probs: computes the source's.
        passages: see Twin.compare.
        served: likewise.
        most: the limit in nats.
        doubts: what that leaves open.
    """
    residuals = np.concatenate([(s - log_probs(p)).ravel() for p, s in zip(passages, served, strict=True)])
    largest = float(np.abs(residuals).max()) if np.isfinite(residuals).all() else math.inf
    line = f"passage_log_prob_difference up to {largest:.4g}, limit {most:g}"
    metric = _metric("passage_log_prob_difference", _rms(residuals), residuals.size, "their source")
    return Findings((line,) if largest > most else (), doubts, (line,), metrics=(metric,))


def _distances(residuals: list[Scores], rounding: list[Scores], extra_rms: float) -> Findings:
    """Hold differences against what rounded arithmetic makes."""
    broken: list[str] = []
    shown: list[str] = []
    found, expected = (np.concatenate([each.ravel() for each in parts]) for parts in (residuals, rounding))
    noise = math.hypot(_rms(expected), extra_rms)
    ratio = noise / max(_rms(expected), 1e-12) if extra_rms else 1.0
    rms_limit = max(_RMS_FACTOR * noise, _RMS_FLOOR)
    most_limit = max(_MOST_FACTOR * ratio * float(np.abs(expected).max()), _MOST_FLOOR)
    most = float(np.abs(found).max())
    for name, value, limit, where in (
        ("passage_log_prob_difference", _rms(found), rms_limit, ""),
        ("the largest of these", most, most_limit, f" ({_place(residuals)})"),
    ):
        (broken if value > limit else shown).append(f"{name} {value:.4g}{where}, limit {limit:.4g}")
    metrics = (
        _metric("passage_log_prob_difference", _rms(found), found.size, "the source in the same number formats"),
        _metric("passage_rounding", noise, found.size, "that source with rounded arithmetic: what is to be expected"),
    )
    return Findings(tuple(broken), shown=tuple(shown), metrics=metrics)


def _place(residuals: list[Scores]) -> str:
    """Say where the largest difference is."""
    kind = max(range(len(residuals)), key=lambda each: np.abs(residuals[each]).max())
    row, place = np.unravel_index(np.abs(residuals[kind]).argmax(), residuals[kind].shape)
    return f"{('passage', 'long passage')[kind]} {row}, scored token {place}"


def _metric(name: str, value: float, n: int, against: str) -> Metric:
    definition = f"root mean square difference of log probabilities of passages' tokens, against {against}"
    return Metric(name, value if math.isfinite(value) else None, "nats", None, n, 0, definition)


def _joined(first: Findings, second: Findings) -> Findings:
    """Put both together."""
    return Findings(
        first.broken + second.broken,
        first.doubts + second.doubts,
        first.shown + second.shown,
        first.notes + second.notes,
        first.metrics + second.metrics,
        first.scales + second.scales,
    )


def _parts(passages: Passages) -> Iterator[tuple[Passages, slice]]:
    """As many as are computed at once, and which they are."""
    count, width = passages.tokens.shape
    rows = max(1, min(_ROWS, 2 * 512 // width))
    for begin, end in pairwise([*range(0, count, rows), count]):
        yield passages.rows(begin, end), slice(begin, end)


def _rms(numbers: Scores) -> float:
    return float(np.sqrt(np.mean(numbers**2)))
