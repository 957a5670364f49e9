"""LAMBADA as data: which requests its metrics need, and how their answers become figures.

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
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from evaluation import metrics
from evaluation.tensors import Generation
from evaluation.tokenizer import Tokenizer
from handover.errors import ConfigError

FULL_FILE_SHA256 = "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"
SUBSET_SHA256 = "59d2ac8c920ce01e7952db060fd9095837c3d68e90ac3b72e3e05e3b2380ce2b"
KNOWN_FILES = {
    FULL_FILE_SHA256: "LAMBADA test set, OpenAI's preprocessing, 5153 texts",
    SUBSET_SHA256: "first 200 texts of the LAMBADA test set, OpenAI's preprocessing",
}

Ids = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Query:
    """One row to send, with log probabilities: greedy, never stopped by an end token.

    Attributes:
        output_length: tokens to generate.
        prompt: token ids.
    """

    output_length: int
    prompt: Ids


@dataclass(frozen=True)
class Sample:
    """One text, split and encoded in each of the three ways.

    Attributes:
        index: line in the file, from 0.
        target: the last word as ``lambada_openai`` sees it, without the space before it.
        last_token: query for the last token.
        last_token_target: the one token.
        last_word: query for FasterTransformer's last word.
        last_word_target: its tokens.
        openai_context: query for lm-eval's context; its answer gives the context's log probability too.
        openai_target: lm-eval's target tokens.
        openai_whole: query that gives the log probability of context and target together.
        cut_tokens: tokens dropped on the left because the model has too few positions.
    """

    index: int
    target: str
    last_token: Query
    last_token_target: int
    last_word: Query
    last_word_target: Ids
    openai_context: Query
    openai_target: Ids
    openai_whole: Query
    cut_tokens: int

    @property
    def queries(self) -> tuple[Query, ...]:
        """All that must be answered before this sample can be scored; some coincide."""
        return (self.last_token, self.last_word, self.openai_context, self.openai_whole)


@dataclass(frozen=True)
class Score:
    """What one sample came to; a field is None if a request that it needs failed.

    Attributes:
        index: line in the file, from 0.
        target: the last word.
        context_tokens: of ``lambada_openai``, after cutting.
        target_tokens: of ``lambada_openai``.
        cut_tokens: dropped on the left of the context.
        last_token_hit, last_word_hit, openai_hit: per metric.
        openai_log_prob: natural log probability of the target given the context.
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
    error: str = ""


@dataclass(frozen=True)
class Metric:
    """A figure by its name.

    Attributes:
        name: one of the names in this module's docstring.
        value: None if no sample could be scored.
        unit: ``fraction`` (0 to 1) or ``perplexity per word``.
        stderr: standard error in the same unit; None below two samples.
        n: samples it rests on.
        failed: samples that are missing from it.
        definition: in one sentence.
    """

    name: str
    value: float | None
    unit: str
    stderr: float | None
    n: int
    failed: int
    definition: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def read_texts(path: Path, samples: int | None) -> list[str]:
    """Read the ``text`` of the first lines of a JSON Lines file.

    Args:
        path: one object with a ``text`` in each line.
        samples: number of lines to take; None for all.

    Raises:
        ConfigError: the file is missing, damaged, or shorter than the samples asked for.
    """
    try:
        # Not splitlines: a text may hold a U+2028, which ends no line of JSON Lines.
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
        texts = [str(json.loads(line)["text"]) for line in lines[:samples]]
    except OSError as error:
        raise ConfigError(f"the LAMBADA file {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not LAMBADA: each line must be an object with a 'text' ({error})") from error
    if not texts or (samples is not None and len(texts) < samples):
        raise ConfigError(f"{path} has {len(texts)} texts, but {samples or 'at least 1'} are asked for")
    return texts


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

    Both queries of ``lambada_openai`` keep the same context, so that their log probabilities subtract;
    it leaves room for the target and one more token.

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
    word_kept = _keep_last(word_context, max_positions, len(word_target))
    token_kept = _keep_last(whole[:-1], max_positions, 1)
    return Sample(
        index=index,
        target=target_text.strip(),
        last_token=Query(1, token_kept),
        last_token_target=whole[-1],
        last_word=Query(len(word_target), word_kept),
        last_word_target=word_target,
        openai_context=Query(len(target), kept),
        openai_target=target,
        openai_whole=Query(1, kept + target),
        cut_tokens=max(len(context) - len(kept), len(word_context) - len(word_kept), len(whole) - 1 - len(token_kept)),
    )


def score_sample(sample: Sample, answers: Mapping[Query, Generation | str]) -> Score:
    """Score one sample from the answers to its queries; a string among the answers is an error."""
    score = Score(
        index=sample.index,
        target=sample.target,
        context_tokens=len(sample.openai_context.prompt),
        target_tokens=len(sample.openai_target),
        cut_tokens=sample.cut_tokens,
    )
    errors = [answer for query in sample.queries if isinstance(answer := answers[query], str)]
    if errors:
        return replace(score, error=errors[0])
    last_token, last_word, context, whole = (_generation(answers[query]) for query in sample.queries)
    return replace(
        score,
        last_token_hit=last_token.tokens == (sample.last_token_target,),
        last_word_hit=last_word.tokens == sample.last_word_target,
        openai_hit=context.tokens == sample.openai_target,
        openai_log_prob=_prompt_log_prob(whole) - _prompt_log_prob(context),
    )


def summarise(scores: Sequence[Score]) -> list[Metric]:
    """Compute every metric over the samples that were scored."""
    failed = sum(1 for score in scores if score.error)

    def share(name: str, hit: Callable[[Score], bool | None], definition: str) -> Metric:
        hits = _present(hit(score) for score in scores)
        value, error = metrics.accuracy(hits), metrics.accuracy_standard_error(hits)
        return Metric(name, value, "fraction", error, len(hits), failed, definition)

    log_probs = _present(score.openai_log_prob for score in scores)
    return [
        share(
            "last_token_accuracy",
            lambda score: score.last_token_hit,
            "one greedy token after all tokens of the text but the last equals the last (FasterTransformer backend)",
        ),
        share(
            "last_word_accuracy_greedy",
            lambda score: score.last_word_hit,
            "greedy generation after the text without its last word gives all tokens of that word (FasterTransformer)",
        ),
        share(
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
            failed,
            "exp of minus the mean log probability of the last word (lm-eval lambada_openai)",
        ),
    ]


def _prompt_log_prob(generation: Generation) -> float:
    # What is left of the sum without the generated tokens is the prompt's own log probability.
    if generation.cum_log_prob is None or generation.log_probs is None:
        raise ValueError("the answer carries no log probabilities")
    return generation.cum_log_prob - sum(generation.log_probs)


def _generation(answer: Generation | str) -> Generation:
    assert isinstance(answer, Generation)
    return answer


def _keep_last(ids: Ids, max_positions: int | None, reserved: int) -> Ids:
    if max_positions is None or len(ids) + reserved <= max_positions:
        return ids
    return ids[-max(1, max_positions - reserved) :]


def _present(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]
