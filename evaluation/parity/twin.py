"""The source in the served model's number formats (its twin): differences over passages, and scaled tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from evaluation.parity.distances import PassageFindings, distances, joined, rms
from evaluation.parity.formats import (
    Formats,
    quantise_head,
    quantise_layers,
    round_inputs,
    round_to_fp8,
    round_weights,
    rounded_arithmetic,
)
from evaluation.parity.passages import Passages, Scores
from evaluation.parity.scales import Scale, Scales, scaled_by, suspects
from evaluation.tasks.metric import FRACTION, LOWER, Metric
from ft_format.weight_format import FP8_FORMATS

_T = TypeVar("_T")
Both = tuple[_T, _T]
More = Callable[[int, int], tuple[Passages, Scores]]
"""Makes further passages and has the server score them; arguments: number of existing passages, number to make."""
LEAST_Z = 7.0  # of a sound model the largest of a hundred tensors has 3 to 4, see docs/accuracy.md
_ROWS = 8  # passages that are computed at once
_SPARE = 1.2  # more passages than the noise needs: how large it is, is itself measured, to a tenth with 48 passages
_NOT_FINITE = "log probabilities of passages are not finite numbers"
_SOURCE_NOT_FINITE = "passages were not compared: the source in the served number formats is not finite there"
_CANDIDATES, _STEP = 6, 0.01


@dataclass(frozen=True)
class _Sample:
    """Passages to average over, with the source's log probabilities, and the served model's less these."""

    passages: Passages
    ours: Scores
    residuals: Scores

    @property
    def count(self) -> int:
        return len(self.residuals)

    def with_more(self, more: _Sample) -> _Sample:
        return _Sample(
            self.passages.with_more(more.passages),
            np.concatenate([self.ours, more.ours]),
            np.concatenate([self.residuals, more.residuals]),
        )


@dataclass(frozen=True)
class _Averaged:
    """The estimated scales of all tensors, the passages of the estimate, and the tensors whose scale is not 1."""

    sample: _Sample
    scales: list[Scale]
    suspected: list[Scale]
    notes: tuple[str, ...]


class Twin:
    """The source in the number formats of the served model.

    Args:
        model: model of transformers in fp32; its weights are rounded in place.
        is_t5: whether it is an encoder-decoder.
        formats: number formats of the served model.
        is_ours: whether the drop-in engine serves the model; another engine may quantize in another way.

    Attributes:
        is_quantized: whether the model has the served numbers of quantized weights, or rounds its inputs as they are
            rounded; int8 needs scores of passages for that.
    """

    def __init__(self, model: Any, is_t5: bool, formats: Formats, is_ours: bool) -> None:
        self._model, self._is_t5, self._formats, self._is_ours = model.requires_grad_(False), is_t5, formats, is_ours
        round_weights(model, formats)
        if formats.weights in FP8_FORMATS:
            round_to_fp8(model, formats)
        round_inputs(model, formats)
        self.is_quantized = formats.weights in FP8_FORMATS or bool(formats.input_scales)

    def compare(
        self, passages: Both[Passages], served: Both[Scores], resolution: float, most: int, more: More
    ) -> PassageFindings:
        """Compare scores of passages to average over, and of passages that visit every position.

        If the former are too few to detect an error of ``resolution``, more are scored.

        Args:
            passages: passages of both kinds.
            served: the server's log probabilities of both.
            resolution: error of a norm's scale that must be detected.
            most: maximum number of passages to average over.
            more: makes and scores further passages.

        Raises:
            ServerError: a request for more failed.
        """
        if not all(np.isfinite(scores).all() for scores in served):
            return PassageFindings((_NOT_FINITE,))
        extra_rms = self._quantise(passages[0], served[0])
        ours = [self._scores(each) for each in passages]
        with rounded_arithmetic(self._model, self._formats.data_type):
            rounding = [self._scores(each) - own for each, own in zip(passages, ours, strict=True)]
        if not all(np.isfinite(each).all() for each in (*ours, *rounding)):
            return PassageFindings(doubts=(_SOURCE_NOT_FINITE,))
        residuals = [theirs - own for theirs, own in zip(served, ours, strict=True)]
        sample = _Sample(passages[0], ours[0], residuals[0])
        is_near = not distances(residuals, rounding, extra_rms, self._formats.data_type).broken
        averaged = self._average(sample, resolution, most if is_near else 0, more)
        if not np.isfinite(averaged.sample.residuals).all():
            return PassageFindings((_NOT_FINITE,), notes=averaged.notes)
        all_residuals = [averaged.sample.residuals, residuals[1]]
        distance = distances(all_residuals, rounding, extra_rms, self._formats.data_type)
        return replace(joined(distance, self._judge(averaged, resolution)), notes=averaged.notes)

    def _average(self, sample: _Sample, resolution: float, most: int, more: More) -> _Averaged:
        """Estimate scales, with more passages while the noise requires them and no tensor is suspected."""
        sums, first, notes = Scales(self._model), sample.count, tuple[str, ...]()
        self._add(sums, sample, sample.residuals)
        while True:
            scales = sums.found()
            suspected = self._suspects(scales, sample, resolution)
            wanted = min(_needed(scales, sample.count, resolution), most)
            if wanted <= sample.count or suspected:
                return _Averaged(sample, scales, suspected, notes)
            passages, served = more(sample.count, wanted - sample.count)
            ours = self._scores(passages)
            extra = _Sample(passages, ours, served - ours)
            seen = _seen(scales)
            sample = sample.with_more(extra)
            notes = notes or (f"{first} passages would have shown a norm's scale to {seen:.2g} only",)
            if not np.isfinite(served).all():
                return _Averaged(sample, scales, [], notes)
            self._add(sums, extra, extra.residuals)

    def _add(self, sums: Scales, sample: _Sample, residuals: Scores) -> None:
        for part, rows in _parts(sample.passages):
            sums.add(lambda part=part: self._log_probs(part), residuals[rows])  # type: ignore[misc]

    def _suspects(self, scales: list[Scale], sample: _Sample, resolution: float) -> list[Scale]:
        """Find tensors whose scale is not the source's, beyond the effect of rounded arithmetic on a correct model.

        Rounding has a systematic part: it makes attention less sharp, as if its keys were smaller, and enough passages
        show this too. If a tensor is suspected, the same estimate is made of the source with rounded arithmetic and
        subtracted.
        """
        found = suspects(scales, LEAST_Z, resolution / 4)
        if not found:
            return []
        with rounded_arithmetic(self._model, self._formats.data_type):
            rounding = self._scores(sample.passages) - sample.ours
        sums = Scales(self._model)
        self._add(sums, sample, rounding)
        usual = {scale.tensor: scale.error for scale in sums.found()}
        return suspects([each.less(usual[each.tensor]) for each in found], LEAST_Z, resolution / 4)[:_CANDIDATES]

    def _quantise(self, passages: Passages, served: Scores) -> float:
        """Make matrices int8 as the engine does, with the head if that is closer (on a GPU it is int8 too).

        Returns:
            Additional difference that another engine's quantization may cause, root mean square in nats.
        """
        if not self._formats.weights or self._formats.weights in FP8_FORMATS:
            return 0.0
        plain = self._scores(passages)
        quantise_layers(self._model)
        ours = self._scores(passages)
        extra = 0.0 if self._is_ours else 2**0.5 * rms(ours - plain)
        head = self._model.get_output_embeddings()
        kept = head.weight
        quantise_head(self._model)
        if rms(served - self._scores(passages)) > rms(served - ours):
            head.weight = kept
        self.is_quantized = self._is_ours
        return extra

    def _judge(self, averaged: _Averaged, resolution: float) -> PassageFindings:
        scales, count = averaged.scales, averaged.sample.count
        seen = _seen(scales)
        has_norms = math.isfinite(seen)
        definition = "error of a norm's scale that passages would show, of the norm that shows it least"
        value = seen if has_norms else None
        metric = Metric("norm_scale_resolution", value, FRACTION, None, count, 0, definition, LOWER)
        found = PassageFindings(metrics=(metric,), scales=tuple(scales))
        if averaged.suspected:
            return replace(found, broken=(self._name(averaged.suspected, averaged.sample),))
        if seen > resolution:
            wanted = "no norm was found"
            if has_norms:
                needed = _needed(scales, count, resolution)
                wanted = f"{count} passages were scored, give evaluation.parity.max_passages={needed}"
            return replace(found, doubts=(f"a norm's scale could be off by {seen:.2g} unseen: {wanted}",))
        shown = f"every norm's scale is its source's, to {seen:.2g} ({count} passages)"
        return replace(found, shown=(shown,))

    def _name(self, suspected: list[Scale], sample: _Sample) -> str:
        """Find the tensor whose scale explains most of the differences, by scaling each candidate."""
        best, most, error = suspected[0], -1.0, 0.0
        ours, residuals = sample.ours, sample.residuals
        for scale in suspected:
            with scaled_by(self._model, scale.tensor, _STEP):
                direction = (self._scores(sample.passages) - ours) / _STEP
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


def _seen(scales: Sequence[Scale]) -> float:
    """Return the error of a norm's scale that is detected for every norm; infinite without norms."""
    errors = [scale.standard_error for scale in scales if scale.is_norm and math.isfinite(scale.standard_error)]
    return LEAST_Z * max(errors, default=math.inf)


def _needed(scales: Sequence[Scale], count: int, resolution: float) -> int:
    """Return the number of passages that detects ``resolution``; noise decreases with the root of their number."""
    seen = _seen(scales)
    return count if seen <= resolution or math.isinf(seen) else math.ceil(_SPARE * count * (seen / resolution) ** 2)


def _parts(passages: Passages) -> Iterator[tuple[Passages, slice]]:
    """Yield batches of passages, each with its range."""
    count, width = passages.tokens.shape
    rows = max(1, min(_ROWS, 2 * 512 // width))
    for begin, end in pairwise([*range(0, count, rows), count]):
        yield passages.rows(begin, end), slice(begin, end)
