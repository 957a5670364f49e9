"""Compare a deployment with itself: ``python3 -m evaluation.consistency --endpoint=... --output=...``.

A token has one log probability, however it comes about. Each of these is asked for, through the endpoint alone:

- ``prompt``: what a prompt was continued by, scored as a part of the prompt: one pass against a step for each token;
- ``warm``: the same prompt again, whose pages a prefix cache may hold;
- ``batch``: all prompts in requests of several rows, and in several requests at once;
- ``after pressure``: the same alone, when requests with other prompts have filled and evicted the cache.

Stale pages show in ``warm`` and ``after pressure``, effects of the batch in ``batch``, wrong states and positions of
decode steps in ``prompt``. Nothing of the checkpoint is needed. Writes what ``evaluation.tasks.outcome`` lists, and
``ways.csv``; the exit status is 1 where a way's log probabilities are further apart than its number format explains.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from evaluation.arguments import ConsistencyArguments
from evaluation.client.connecting import connect
from evaluation.client.model_connection import ModelFiles, Query
from evaluation.client.served_identity import check_unchanged
from evaluation.client.served_model import Target, open_named
from evaluation.divergence.arguments import check_texts
from evaluation.divergence.corpus import Ids, digest_of, make_passages, read_documents
from evaluation.parity.arguments import FP8_CACHE
from evaluation.tasks import outcome as files
from evaluation.tasks.metric import FAILS, FRACTION, HIGHER, HOLDS, LOWER, Metric
from evaluation.tasks.scoring import Scorer
from evaluation.tasks.target import ask_all, find_tokenizer, in_batches
from handover.errors import ConfigError, ServerError, exit_status

TASK = "consistency"
WARM, BATCH, PRESSURE, PROMPT = "warm", "batch", "after pressure", "prompt"
# By number format: mean and largest difference of a token's log probability, as conf/evaluation/parity.yaml allows it
# between a served model and its source: twice the same rounding.
LIMITS: dict[str, tuple[float, float]] = {
    "fp32": (0.001, 0.01),
    "fp16": (0.01, 0.1),
    "bf16": (0.1, 0.8),
    "int8": (0.2, 1.0),
    FP8_CACHE: (0.1, 0.8),
}
_WORDS = {
    WARM: "a prompt's second answer is another one, as where a prefix cache gives back what is not the prompt's own",
    BATCH: "a prompt among others has another answer, as where rows of a batch reach each other",
    PRESSURE: "a prompt has another answer after the cache was full, as where evicted pages are still read",
    PROMPT: "the same tokens as a prompt have other scores: decode steps and passes over a prompt are not the same",
}


@dataclass(frozen=True)
class Made:
    """What a prompt was continued by: token ids, and their log probabilities."""

    tokens: Ids
    log_probs: tuple[float, ...]


@dataclass(frozen=True)
class Way:
    """A row of ``ways.csv``: one way of asking, against each prompt alone and for the first time.

    Attributes:
        tokens: that were compared: up to the first that differs, of which both sides' are.
        mean_difference, max_difference: of a token's log probability, in nats.
        identical: share of prompts that are continued by the same tokens.
        mean_limit, max_limit: of the number format.
        verdict: HOLDS or FAILS.
    """

    way: str
    tokens: int
    mean_difference: float
    max_difference: float
    identical: float
    mean_limit: float
    max_limit: float
    verdict: str


def main(argv: Sequence[str]) -> None:
    """Ask in every way, compare, write, and fail where a way fails."""
    arguments = ConsistencyArguments.from_argv(argv, description=__doc__)
    check_texts(arguments, None)
    target = _open(arguments)
    prompts, others = _prompts(arguments, target)
    alone = _continue(arguments, target, prompts, 1, 1)
    found = {WARM: _continue(arguments, target, prompts, 1, 1)}
    found[BATCH] = _continue(arguments, target, prompts, target.batch_size, arguments.concurrency)
    _continue(arguments, target, others, target.batch_size, arguments.concurrency)
    found[PRESSURE] = _continue(arguments, target, prompts, 1, 1)
    found[PROMPT] = _score(arguments, target, prompts, alone)
    check_unchanged(arguments.endpoint, target.served.endpoint, arguments.model)
    precision = arguments.precision or _precision(target)
    ways = [
        _compare(way, alone, made, _gaps(arguments, target, prompts, alone, made), LIMITS[precision])
        for way, made in found.items()
    ]
    reasons = tuple(_reason(way, precision) for way in ways if way.verdict == FAILS)
    _write(arguments, target, prompts, ways, reasons)
    if reasons:
        raise ServerError(f"the served model is not consistent with itself: {'; '.join(reasons)}")


def _open(arguments: ConsistencyArguments) -> Target:
    target = open_named(arguments)
    can = target.capabilities
    if can:
        sys.stdout.write(f"{can.line()}\n")
    scores = can.scores_prompts and can.takes_ids and can.names_ids if can else target.interface.can_score
    if not target.interface.takes_ids or target.interface.is_encoder_decoder or not scores:
        raise ConfigError(
            f"'{arguments.model}' at {target.url} takes no token ids, or does not score those of a prompt",
            "give an endpoint of a decoder that has token ids as prompts and echo with logprobs, or gRPC's tensors",
        )
    return target


def _precision(target: Target) -> str:
    """Return the coarsest number format that the deployment says; fp32, which is the strictest, where it says none."""
    settings = {**target.interface.parameters, **target.served.endpoint.settings}
    if settings.get("int8_mode", "0") != "0":
        return "int8"
    if settings.get("kv_cache_dtype", "").startswith("fp8"):  # decode steps read it, and a pass over a prompt does not
        return FP8_CACHE
    said = [each for each in LIMITS if each in (settings.get("data_type"), settings.get("weight_data_type"))]
    return said[-1] if said else "fp32"


def _prompts(arguments: ConsistencyArguments, target: Target) -> tuple[list[Ids], list[Ids]]:
    """Cut texts into the prompts, and as many times ``pressure`` others."""
    documents = read_documents(arguments.data_path)
    needs = any(isinstance(each, str) for each in documents)
    tokenizer = find_tokenizer(target, arguments.tokenizer) if needs else None
    limit, longest = target.served.max_positions, arguments.longest_prompt
    if limit is not None:
        longest = min(longest, limit - arguments.output_length - 1)
    count, vocabulary = arguments.samples, target.served.vocab_size or 2**31
    found = make_passages(documents, tokenizer, longest, count * (1 + arguments.pressure), vocabulary)
    if len(found) <= count:
        raise ConfigError(f"{TASK}: the texts make {len(found)} prompts", f"samples is {count}: take fewer")
    return found[:count], found[count:]


def _continue(
    arguments: ConsistencyArguments, target: Target, prompts: Sequence[Ids], rows: int, concurrency: int
) -> list[Made]:
    queries = [Query(arguments.output_length, prompt, wants_log_probs=True) for prompt in dict.fromkeys(prompts)]
    answers = ask_all(
        lambda: connect(target, arguments.timeout_s, ModelFiles()),
        in_batches(queries, rows),
        concurrency,
        lambda connection, batch: [_made(each) for each in connection.ask(batch)],
        TASK,
    )
    found = [answers[Query(arguments.output_length, prompt, wants_log_probs=True)] for prompt in prompts]
    for answer in found:
        if isinstance(answer, str):
            raise ServerError(f"a prompt was not continued: {answer}")
    return [answer for answer in found if not isinstance(answer, str)]


def _made(answer: Any) -> Made:
    if answer is None or answer.log_probs is None or not answer.tokens:
        raise ServerError("an answer lacks tokens or log probabilities")
    return Made(answer.tokens, answer.log_probs[: len(answer.tokens)])


def _score(arguments: ConsistencyArguments, target: Target, prompts: Sequence[Ids], made: Sequence[Made]) -> list[Made]:
    with closing(Scorer(target, arguments.timeout_s)) as scorer:
        scores = scorer.score([(prompt, each.tokens) for prompt, each in zip(prompts, made, strict=True)])
    return [Made(each.tokens, score.log_probs) for each, score in zip(made, scores, strict=True)]


def _common(first: Made, other: Made) -> int:
    """Return how many tokens are the same before the first that differs."""
    pairs = zip(first.tokens, other.tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _gaps(
    arguments: ConsistencyArguments,
    target: Target,
    prompts: Sequence[Ids],
    alone: Sequence[Made],
    others: Sequence[Made],
) -> list[float]:
    """Score the tokens that two continuations differ in first.

    Differences of up to e between two ways of computing them make another token the most probable only where both are
    within 2 e of each other.

    Returns:
        Half the difference of their log probabilities, for each prompt with such tokens.
    """
    pairs = []
    for prompt, first, other in zip(prompts, alone, others, strict=True):
        same = _common(first, other)
        if same < min(len(first.tokens), len(other.tokens)):
            pairs += [((*prompt, *first.tokens[:same]), each.tokens[same : same + 1]) for each in (first, other)]
    if not pairs:
        return []
    with closing(Scorer(target, arguments.timeout_s)) as scorer:
        scores = [each.log_probs[0] for each in scorer.score(pairs)]
    return [abs(first - other) / 2 for first, other in zip(scores[::2], scores[1::2], strict=True)]


def _compare(
    way: str,
    alone: Sequence[Made],
    others: Sequence[Made],
    gaps: Sequence[float],
    limits: tuple[float, float],
) -> Way:
    differences, identical = list(gaps), list[float]()
    for first, other in zip(alone, others, strict=True):
        same = _common(first, other)
        differences += np.abs(np.subtract(first.log_probs[:same], other.log_probs[:same])).tolist()
        identical.append(same == len(first.tokens) == len(other.tokens))
    mean, most = (float(each) for each in (np.mean(differences), np.max(differences))) if differences else (np.inf,) * 2
    holds = mean <= limits[0] and most <= limits[1]
    return Way(way, len(differences), mean, most, float(np.mean(identical)), *limits, HOLDS if holds else FAILS)


def _reason(way: Way, precision: str) -> str:
    return (
        f"{way.way}: {_WORDS[way.way]}: log probabilities differ by {way.mean_difference:.3g} in the mean and"
        f" {way.max_difference:.3g} at most, where {precision} explains {way.mean_limit:g} and {way.max_limit:g};"
        f" {way.identical:.0%} of the continuations are the same"
    )


def _write(
    arguments: ConsistencyArguments, target: Target, prompts: Sequence[Ids], ways: Sequence[Way], reasons: Sequence[str]
) -> None:
    metrics = []
    for way in ways:
        name = way.way.replace(" ", "_")
        of = f"between each prompt alone and {way.way}"
        mean = f"mean difference of a token's log probability {of}"
        metrics.append(Metric(f"{name}_difference", way.mean_difference, "nats", None, way.tokens, 0, mean, LOWER))
        share = f"prompts that are continued by the same tokens {of}"
        metrics.append(Metric(f"{name}_identical", way.identical, FRACTION, None, len(prompts), 0, share, HIGHER))
    verdict = {"verdict": FAILS if reasons else HOLDS, "reasons": list(reasons)}
    file = arguments.data_path
    data = {"file": file.name if file else "the package's texts", "sha256": digest_of(prompts)}
    about = {"data": data, "model": target.identity}
    files.write_results(
        arguments.output,
        {"ways.csv": ways},
        {**verdict, **{metric.name: metric.value for metric in metrics}},
        files.describe_results(TASK, metrics, len(prompts), 0, {**about, **verdict}),
        about,
    )
    for way in ways:
        difference = f"{way.mean_difference:.3g} {way.max_difference:.3g} nats, {way.identical:.0%} identical"
        sys.stdout.write(f"{way.way:<16} {difference}: {way.verdict}\n")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "consistency"))
