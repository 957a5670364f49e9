"""LAMBADA as data: which spans of which texts its metrics look at, and how what is known of them becomes figures.

"LAMBADA accuracy" means different things in different places, so each has a name here:

``last_token_accuracy``
    FasterTransformer backend, ``tools/gpt/evaluate_lambada.py``: the whole text is encoded, all tokens
    but the last are the context, and one greedy token must equal the last.
``last_word_accuracy_greedy``
    FasterTransformer, ``examples/pytorch/gpt/lambada_task_example.py``: the context is the stripped text
    before the last word (split at any white space), the target is a space and that word, encoded on its
    own; greedy generation must give every target token. (For the 7 texts of the full file whose last word
    follows other white space than a space, that script does not find the word and cuts one character
    instead; here the word itself is cut.)
``lambada_openai_accuracy``, ``lambada_openai_perplexity``
    lm-eval 1.0, task ``lambada_openai``: context and target are split at the last space and encoded
    jointly; the accuracy asks whether every target token is the most probable one after its
    predecessors, the perplexity is exp(-mean over documents of the target's summed log probability).
``1-gram_accuracy`` to ``4-gram_accuracy``
    FasterTransformer backend, the same script without ``--n-gram-disable``: after each token of each text k
    greedy tokens are generated, and all must equal the text's. Greedy tokens equal the text's just as long as
    each is the most probable one after the text before it, so one pass over a text answers all of them.

All are questions about a span: is every token of it the most probable one after its predecessors (which is when greedy
generation gives it), and what is its log probability?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evaluation import metrics
from evaluation.figures import FRACTION, Metric, share
from evaluation.tokenizer import Tokenizer
from handover.errors import ConfigError

Ids = tuple[int, ...]
LONGEST_GRAM = 4


@dataclass(frozen=True, order=True)
class Span:
    """The end of a sequence, which the model should continue to.

    Attributes:
        sequence: token ids.
        start: where the span begins, at least 1.
    """

    sequence: Ids
    start: int

    @property
    def target(self) -> Ids:
        """The tokens of the span."""
        return self.sequence[self.start :]


@dataclass(frozen=True)
class Verdict:
    """What the model makes of a span.

    Attributes:
        is_hit: every token of it is the most probable one after its predecessors.
        log_prob: natural log probability of the span after what precedes it; None if nobody asked.
        gram_hits: of the whole sequence, how many runs of 1, 2, ... tokens are hits; None if only the span is known.
    """

    is_hit: bool
    log_prob: float | None = None
    gram_hits: tuple[int, ...] | None = None


Answer = Verdict | str | None
"""A str is the error of the request; None: the model cannot be asked about the span."""


@dataclass(frozen=True)
class Sample:
    """One text, split and encoded in each of the three ways.

    Attributes:
        index: line in the file, from 0.
        target: the last word as ``lambada_openai`` sees it, without the space before it.
        last_token: the last token of the text.
        last_word: FasterTransformer's last word.
        openai: lm-eval's.
        cut_tokens: tokens dropped on the left because the model has too few positions.
    """

    index: int
    target: str
    last_token: Span
    last_word: Span
    openai: Span
    cut_tokens: int

    @property
    def spans(self) -> dict[Span, bool]:
        """All that is asked, and whether the log probability is; some coincide."""
        return {self.last_token: False, self.last_word: False, self.openai: True}


@dataclass(frozen=True)
class Score:
    """What one sample came to; a field is None if a request that it needs failed or cannot be sent.

    Attributes:
        index: line in the file, from 0.
        target: the last word.
        context_tokens: of ``lambada_openai``, after cutting.
        target_tokens: of ``lambada_openai``.
        cut_tokens: dropped on the left of the context.
        last_token_hit, last_word_hit, openai_hit: per metric.
        openai_log_prob: natural log probability of the target given the context.
        text_tokens: of the whole text, after cutting.
        gram_hits_1, gram_hits_2, gram_hits_3, gram_hits_4: runs of so many tokens of the text that greedy generation
            gives after what precedes them.
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
    text_tokens: int | None = None
    gram_hits_1: int | None = None
    gram_hits_2: int | None = None
    gram_hits_3: int | None = None
    gram_hits_4: int | None = None
    error: str = ""


def split_openai(text: str) -> tuple[str, str]:
    """Split at the last space as lm-eval does; a context's trailing white space moves to the target."""
    context, _, word = text.rpartition(" ")
    stripped = context.rstrip()
    return stripped, f"{context[len(stripped) :]} {word}"


def split_last_word(text: str) -> tuple[str, str]:
    """Split off the last word, at any white space; the target is a space and the word."""
    word = text.split()[-1]
    return text.rstrip()[: -len(word)].strip(), f" {word}"


def prepare_sample(index: int, text: str, tokenizer: Tokenizer, max_positions: int | None) -> Sample:
    """Encode a text for every metric and cut contexts that the model has no positions for.

    What is kept leaves room for one more token: an answer generates at least one.

    Raises:
        ConfigError: the text has no context or no last word.
    """
    context_text, target_text = split_openai(text)
    word_context_text, word_text = split_last_word(text) if text.strip() else ("", "")
    whole = tuple(tokenizer.encode(text))
    context = tuple(tokenizer.encode(context_text))
    joint = tuple(tokenizer.encode(context_text + target_text))
    target = joint[len(context) :]
    word_context, word_target = tuple(tokenizer.encode(word_context_text)), tuple(tokenizer.encode(word_text))
    if not context or not target or not word_context or not word_target:
        raise ConfigError(f"text {index + 1} has no context or no last word: {text[:60]!r}")
    kept = _keep_last(context, max_positions, len(target) + 1)
    word_kept = _keep_last(word_context, max_positions, len(word_target) + 1)
    token_kept = _keep_last(whole[:-1], max_positions, 2)
    return Sample(
        index=index,
        target=target_text.strip(),
        last_token=Span(token_kept + whole[-1:], len(token_kept)),
        last_word=Span(word_kept + word_target, len(word_kept)),
        openai=Span(kept + target, len(kept)),
        cut_tokens=max(len(context) - len(kept), len(word_context) - len(word_kept), len(whole) - 1 - len(token_kept)),
    )


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
    found = [answers[span] for span in (sample.last_token, sample.last_word, sample.openai)]
    errors = [answer for answer in found if isinstance(answer, str)]
    if errors:
        return replace(score, error=errors[0])
    if any(isinstance(answer, Verdict) and not math.isfinite(answer.log_prob or 0.0) for answer in found):
        return replace(score, error="the server's log probabilities are not finite numbers")
    token, word, openai = (answer if isinstance(answer, Verdict) else None for answer in found)
    grams = (token.gram_hits if token else None) or (None,) * LONGEST_GRAM
    return replace(
        score,
        last_token_hit=token.is_hit if token else None,
        last_word_hit=word.is_hit if word else None,
        openai_hit=openai.is_hit if openai else None,
        openai_log_prob=openai.log_prob if openai else None,
        gram_hits_1=grams[0],
        gram_hits_2=grams[1],
        gram_hits_3=grams[2],
        gram_hits_4=grams[3],
    )


def summarise(scores: Sequence[Score]) -> list[Metric]:
    """Compute every metric over the samples that were scored; k-grams only where the model can tell."""

    def hits(name: str, hit: Callable[[Score], bool | None], definition: str) -> Metric:
        return share(name, map(hit, scores), definition)

    log_probs = _present(score.openai_log_prob for score in scores)
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
        Metric(
            "lambada_openai_perplexity",
            metrics.perplexity(log_probs),
            "perplexity per word",
            metrics.perplexity_standard_error(log_probs),
            len(log_probs),
            len(scores) - len(log_probs),
            "exp of minus the mean log probability of the last word (lm-eval lambada_openai)",
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
        definition = f"{length} greedy tokens after any token of a text equal the text's (FasterTransformer backend)"
        value = hits / places if places else None
        figures.append(
            Metric(f"{length}-gram_accuracy", value, FRACTION, None, places, len(scores) - len(known), definition)
        )
    return figures


def _keep_last(ids: Ids, max_positions: int | None, reserved: int) -> Ids:
    if max_positions is None or len(ids) + reserved <= max_positions:
        return ids
    return ids[-max(1, max_positions - reserved) :]


def _present(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]
