"""The run that translation and summarization share: generate texts, measure the time, score and write results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.arguments import TextPairArguments
from evaluation.client.model_connection import Continuation
from evaluation.client.request_tensors import Sampling
from evaluation.speed.tables.formulas import NANOSECONDS_PER_S
from evaluation.tasks.metric import HIGHER, Metric
from evaluation.tasks.outcome import Outcome
from evaluation.tasks.prompting import Completer, Prompter
from evaluation.tasks.target import find_target, find_tokenizer
from evaluation.tasks.texts.pairs import Pair, check_pairs
from handover.digests import file_digest
from handover.errors import ServerError

PREDICTIONS_NAME = "predictions.txt"


@dataclass(frozen=True)
class TextSample:
    """The result for one source; a task adds its own figures.

    Attributes:
        index: line in the file, from 0.
        prompt_tokens: number of tokens of the prompt.
        cut_tokens: tokens that were cut from the source because the model has too few positions.
        generated_tokens: number of generated tokens with the end token; None if the request failed.
        prediction: the generated text.
        error: why there is no prediction; empty otherwise.
    """

    index: int
    prompt_tokens: int
    cut_tokens: int
    generated_tokens: int | None
    prediction: str
    error: str


@dataclass(frozen=True)
class Predictions:
    """The predictions of a run.

    Attributes:
        pairs: sources and references.
        samples: one sample for each pair, in order.
        elapsed_ns: time from the first request to the last answer.
    """

    pairs: Sequence[Pair]
    samples: Sequence[TextSample]
    elapsed_ns: int

    @property
    def answered(self) -> list[tuple[str, str]]:
        """Predictions with their references, without failed samples."""
        pairs = zip(self.samples, self.pairs, strict=True)
        return [(sample.prediction, pair.reference) for sample, pair in pairs if not sample.error]


Scored = tuple[list[Metric], Sequence[Any], dict[str, Any]]
"""A task's metrics, its samples, and settings that the metrics depend on."""


def run_text_task(task: str, arguments: TextPairArguments, score: Callable[[Predictions], Scored]) -> None:
    """Generate every text, score, write the results, and fail if any text is missing."""
    pairs, template = check_pairs(arguments)
    target = find_target(task, arguments)
    tokenizer = find_tokenizer(target, arguments.tokenizer)
    prompter = Prompter(template, tokenizer, target, arguments.max_output_len)
    prompts = [prompter.write({"source": pair.source}) for pair in pairs]
    sampling = Sampling(beam_width=arguments.beam_width)
    completer = Completer(target, arguments, tokenizer, arguments.max_output_len, sampling=sampling)
    first = next((prompt for prompt in prompts if not prompt.problem), prompts[0])
    if isinstance(warm := completer.complete([first])[0], str):  # a warm-up request, which is not timed
        raise ServerError(f"no text came back: {warm}")
    started = time.monotonic_ns()
    answers = completer.complete(prompts)
    elapsed_ns = time.monotonic_ns() - started
    samples = [
        _sample(index, len(prompt.ids), prompt.cut_tokens, answer, template.read_answer)
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    written = Predictions(pairs, samples, elapsed_ns)
    metrics, rows, basis = score(written)
    settings = {"prompt": template.prompt_template, "max_output_len": arguments.max_output_len}
    outcome = Outcome(
        task=task,
        metrics=[*metrics, _speed(written)],
        samples=rows,
        cut_contexts=sum(1 for prompt in prompts if prompt.cut_tokens),
        data=_data(arguments),
        settings={**settings, "beam_width": arguments.beam_width, "elapsed_s": elapsed_ns / NANOSECONDS_PER_S, **basis},
    )
    lines = "".join(f"{' '.join(sample.prediction.split())}\n" for sample in samples)
    outcome.write(arguments.output, target, {PREDICTIONS_NAME: lines})
    outcome.show()


def _sample(index: int, given: int, cut: int, answer: Continuation | str, read: Callable[[str], str]) -> TextSample:
    if isinstance(answer, str):
        return TextSample(index, given, cut, None, "", answer)
    return TextSample(index, given, cut, answer.generated, read(answer.text), "")


def _speed(written: Predictions) -> Metric:
    """Compute generated tokens per second over the whole run with all its concurrency; failed texts count none."""
    counts = [sample.generated_tokens for sample in written.samples if sample.generated_tokens is not None]
    value = sum(counts) * NANOSECONDS_PER_S / written.elapsed_ns if counts else None
    definition = (
        "tokens generated, those that end a text included, per second from the first request to the last answer"
    )
    failed = len(written.samples) - len(counts)
    return Metric("tokens_per_s", value, "tokens/s", None, len(counts), failed, definition, HIGHER)


def _data(arguments: TextPairArguments) -> dict[str, str]:
    digests = [file_digest(path).removeprefix("sha256:") for path in arguments.data_files]
    return {"file": " ".join(path.name for path in arguments.data_files), "sha256": " ".join(digests), "known_as": ""}
