"""LAMBADA's metrics from the scores of spans; ``evaluation.tasks.lambada.spans`` defines them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evaluation.speed.tables import formulas
from evaluation.tasks.lambada.spans import Sample, Span
from evaluation.tasks.metric import FRACTION, HIGHER, LOWER, PERPLEXITY, Metric, share

LONGEST_GRAM = 4


@dataclass(frozen=True)
class Verdict:
    """A model's score of a span.

    Attributes:
        is_hit: whether every token of the span is the most probable one given its predecessors.
        log_prob: natural log probability of the span given what precedes it; None if not requested.
        gram_hits: number of runs of 1, 2, ... tokens of the whole sequence that are hits; None if only the span was
            scored.
    """

    is_hit: bool
    log_prob: float | None = None
    gram_hits: tuple[int, ...] | None = None


SpanAnswer = Verdict | str | None
"""A score; a str is the error of the request; None: the model cannot score the span."""


@dataclass(frozen=True)
class SampleScore:
    """The scores of one sample; a field is None if a request for it failed or cannot be sent.

    Attributes:
        index: line in the file, from 0.
        target: the last word.
        context_tokens: tokens of the context of ``lambada_openai``, after cutting.
        target_tokens: tokens of the target of ``lambada_openai``.
        cut_tokens: tokens that were cut on the left of the context.
        last_token_hit, last_word_hit, openai_hit, harness_hit: hit or miss of each accuracy.
        openai_log_prob, harness_log_prob: natural log probability of the target given the context.
        text_tokens: tokens of the whole text, after cutting.
        gram_hits_1, gram_hits_2, gram_hits_3, gram_hits_4: runs of 1, 2, 3 and 4 tokens of the text that greedy
            decoding generates after what precedes them.
        error: why figures are missing; empty otherwise.
    """

    index: int
    target: str
    context_tokens: int
    target_tokens: int
    cut_tokens: int
    last_token_hit: bool | None = None
    last_word_hit: bool | None = None
    openai_hit: bool | None = None
    openai_log_prob: float | None = None
    harness_hit: bool | None = None
    harness_log_prob: float | None = None
    text_tokens: int | None = None
    gram_hits_1: int | None = None
    gram_hits_2: int | None = None
    gram_hits_3: int | None = None
    gram_hits_4: int | None = None
    error: str = ""


def judge_scored(span: Span, log_probs: Sequence[float], best: Sequence[int]) -> Verdict:
    """Score a span from one forward pass over its sequence.

    Args:
        span: the span.
        log_probs: natural log probability of each token of the sequence but the first.
        best: the most probable token at each of these positions.
    """
    hits = [token == given for token, given in zip(best, span.sequence[1:], strict=True)]
    runs, grams = 0, [0] * LONGEST_GRAM
    for hit in hits:
        runs = runs + 1 if hit else 0
        for length in range(min(runs, LONGEST_GRAM)):
            grams[length] += 1
    return Verdict(all(hits[span.start - 1 :]), math.fsum(log_probs[span.start - 1 :]), tuple(grams))


def score_sample(sample: Sample, answers: Mapping[Span, SpanAnswer]) -> SampleScore:
    """Score one sample from the answers for its spans."""
    score = SampleScore(
        index=sample.index,
        target=sample.target,
        context_tokens=sample.openai.start,
        target_tokens=len(sample.openai.target),
        cut_tokens=sample.cut_tokens,
        text_tokens=len(sample.last_token.sequence),
    )
    found = {name: answers[getattr(sample, name)] for name in ("last_token", "last_word", "openai", "harness")}
    errors = [answer for answer in found.values() if isinstance(answer, str)]
    if errors:
        return replace(score, error=errors[0])
    verdicts = {name: answer for name, answer in found.items() if isinstance(answer, Verdict)}
    if not all(math.isfinite(verdict.log_prob or 0.0) for verdict in verdicts.values()):
        return replace(score, error="the server's log probabilities are not finite numbers")
    known: dict[str, Any] = {f"{name}_hit": verdict.is_hit for name, verdict in verdicts.items()}
    known |= {f"{name}_log_prob": verdicts[name].log_prob for name in ("openai", "harness") if name in verdicts}
    grams = verdicts["last_token"].gram_hits if "last_token" in verdicts else None
    known |= {f"gram_hits_{length}": hits for length, hits in enumerate(grams or (), 1)}
    return replace(score, **known)


def summarise(scores: Sequence[SampleScore]) -> list[Metric]:
    """Compute every metric over the scored samples; k-grams only if the model scores whole sequences."""

    def hits(name: str, hit: Callable[[SampleScore], bool | None], definition: str) -> Metric:
        return share(name, map(hit, scores), definition)

    def perplexity(name: str, log_prob: Callable[[SampleScore], float | None], definition: str) -> Metric:
        known = [value for value in map(log_prob, scores) if value is not None]
        value, error = formulas.perplexity(known), formulas.perplexity_standard_error(known)
        return Metric(name, value, PERPLEXITY, error, len(known), len(scores) - len(known), definition, LOWER)

    return [
        hits(
            "last_token_accuracy",
            lambda score: score.last_token_hit,
            "one greedy token after all tokens of the text but the last equals the last (FasterTransformer backend)",
        ),
        hits(
            "last_word_accuracy_greedy",
            lambda score: score.last_word_hit,
            "greedy generation after the text without its last word gives all tokens of that word (FasterTransformer)",
        ),
        hits(
            "lambada_openai_accuracy",
            lambda score: score.openai_hit,
            "every token of the last word is the most probable after its predecessors (lm-eval lambada_openai)",
        ),
        perplexity(
            "lambada_openai_perplexity",
            lambda score: score.openai_log_prob,
            "exp of minus the mean log probability of the last word (lm-eval lambada_openai)",
        ),
        hits(
            "nemo_harness_accuracy",
            lambda score: score.harness_hit,
            "as lambada_openai_accuracy, after a line feed and with straight quotes (NeMo-Megatron-Launcher)",
        ),
        perplexity(
            "nemo_harness_perplexity",
            lambda score: score.harness_log_prob,
            "as lambada_openai_perplexity, after a line feed and with straight quotes (NeMo-Megatron-Launcher)",
        ),
        *_grams(scores),
    ]


def _grams(scores: Sequence[SampleScore]) -> list[Metric]:
    """Compute k-gram accuracies over all positions of all texts, without a standard error: positions are dependent."""
    known = [score for score in scores if score.gram_hits_1 is not None and score.text_tokens is not None]
    figures = []
    for length in range(1, LONGEST_GRAM + 1 if known else 1):
        places = sum(max(0, (score.text_tokens or 0) - length) for score in known)
        hits = sum(getattr(score, f"gram_hits_{length}") for score in known)
        tokens = "the greedy token" if length == 1 else f"each of {length} greedy tokens"
        definition = f"{tokens} after any token of a text equals the text's own (FasterTransformer backend)"
        value = hits / places if places else None
        name, failed = f"{length}-gram_accuracy", len(scores) - len(known)
        figures.append(Metric(name, value, FRACTION, None, places, failed, definition, HIGHER))
    return figures
