"""LAMBADA's figures from what a model makes of spans; what they mean stands in ``evaluation.tasks.lambada.spans``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from evaluation.speed import formulas
from evaluation.tasks.lambada.spans import Sample, Span
from evaluation.tasks.metric import FRACTION, Metric, share

LONGEST_GRAM = 4


@dataclass(frozen=True)
class Verdict:
    """What the model makes of a span.

    Attributes:
        is_hit: every token of it is the most probable one after its predecessors.
        log_prob: natural log probability of the span after what precedes it; None if it was not asked for.
        gram_hits: of the whole sequence, how many runs of 1, 2, ... tokens are hits; None if only the span is known.
    """

    is_hit: bool
    log_prob: float | None = None
    gram_hits: tuple[int, ...] | None = None


Answer = Verdict | str | None
"""A str is the error of the request; None: the model cannot be asked about the span."""


@dataclass(frozen=True)
class Score:
    """What one sample came to; a field is None if a request that it needs failed or cannot be sent.

    Attributes:
        index: line in the file, from 0.
        target: the last word.
        context_tokens: of ``lambada_openai``, after cutting.
        target_tokens: of ``lambada_openai``.
        cut_tokens: dropped on the left of the context.
        last_token_hit, last_word_hit, openai_hit, harness_hit: per metric.
        openai_log_prob, harness_log_prob: natural log probability of the target given the context.
        text_tokens: of the whole text, after cutting.
        gram_hits_1, gram_hits_2, gram_hits_3, gram_hits_4: runs of 1, 2, 3 and 4 tokens of the text that greedy
            generation gives after what precedes them.
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
    """Judge a span by one pass over its sequence.

    Args:
        span: what is asked about.
        log_probs: of each token of the sequence but the first.
        best: the most probable token in each of these places.
    """
    hits = [token == given for token, given in zip(best, span.sequence[1:], strict=True)]
    runs, grams = 0, [0] * LONGEST_GRAM
    for hit in hits:
        runs = runs + 1 if hit else 0
        for length in range(min(runs, LONGEST_GRAM)):
            grams[length] += 1
    return Verdict(all(hits[span.start - 1 :]), math.fsum(log_probs[span.start - 1 :]), tuple(grams))


def score_sample(sample: Sample, answers: Mapping[Span, Answer]) -> Score:
    """Score one sample from the answers about its spans."""
    score = Score(
        index=sample.index,
        target=sample.target,
        context_tokens=sample.openai.start,
        target_tokens=len(sample.openai.target),
        cut_tokens=sample.cut_tokens,
        text_tokens=len(sample.last_token.sequence),
    )
    spans = (sample.last_token, sample.last_word, sample.openai, sample.harness)
    found = [answers[span] for span in spans]
    errors = [answer for answer in found if isinstance(answer, str)]
    if errors:
        return replace(score, error=errors[0])
    if any(isinstance(answer, Verdict) and not math.isfinite(answer.log_prob or 0.0) for answer in found):
        return replace(score, error="the server's log probabilities are not finite numbers")
    token, word, openai, harness = (answer if isinstance(answer, Verdict) else None for answer in found)
    grams = (token.gram_hits if token else None) or (None,) * LONGEST_GRAM
    return replace(
        score,
        last_token_hit=token.is_hit if token else None,
        last_word_hit=word.is_hit if word else None,
        openai_hit=openai.is_hit if openai else None,
        openai_log_prob=openai.log_prob if openai else None,
        harness_hit=harness.is_hit if harness else None,
        harness_log_prob=harness.log_prob if harness else None,
        gram_hits_1=grams[0],
        gram_hits_2=grams[1],
        gram_hits_3=grams[2],
        gram_hits_4=grams[3],
    )


def summarise(scores: Sequence[Score]) -> list[Metric]:
    """Compute every metric over the samples that were scored; k-grams only where the model can tell."""

    def hits(name: str, hit: Callable[[Score], bool | None], definition: str) -> Metric:
        return share(name, map(hit, scores), definition)

    def perplexity(name: str, log_prob: Callable[[Score], float | None], definition: str) -> Metric:
        known = [value for value in map(log_prob, scores) if value is not None]
        value, error = formulas.perplexity(known), formulas.perplexity_standard_error(known)
        return Metric(name, value, "perplexity per word", error, len(known), len(scores) - len(known), definition)

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


def _grams(scores: Sequence[Score]) -> list[Metric]:
    """K-gram accuracies over all places of all texts; a standard error would need independent places."""
    known = [score for score in scores if score.gram_hits_1 is not None and score.text_tokens is not None]
    figures = []
    for length in range(1, LONGEST_GRAM + 1 if known else 1):
        places = sum(max(0, (score.text_tokens or 0) - length) for score in known)
        hits = sum(getattr(score, f"gram_hits_{length}") for score in known)
        tokens = "the greedy token" if length == 1 else f"each of {length} greedy tokens"
        definition = f"{tokens} after any token of a text equals the text's own (FasterTransformer backend)"
        value = hits / places if places else None
        figures.append(
            Metric(f"{length}-gram_accuracy", value, FRACTION, None, places, len(scores) - len(known), definition)
        )
    return figures
