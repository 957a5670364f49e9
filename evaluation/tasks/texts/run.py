"""What translation and summarization have in common: ask for texts, take the time, keep what came back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.arguments import TextPairArguments
from evaluation.client.request_tensors import Sampling
from evaluation.speed.formulas import NANOSECONDS_PER_S
from evaluation.tasks.metric import Metric
from evaluation.tasks.outcome import Outcome
from evaluation.tasks.prompting import Answer, Completer, Prompter
from evaluation.tasks.target import find_target, find_tokenizer
from evaluation.tasks.texts.pairs import Pair, check_pairs
from handover.digests import file_digest
from handover.durable import write_atomically
from handover.errors import ServerError

PREDICTIONS_NAME = "predictions.txt"


@dataclass(frozen=True)
class TextSample:
    """What one text came to; a task adds its own figures.

    Attributes:
        index: line in the file, from 0.
        prompt_tokens: that were sent.
        cut_tokens: dropped from the source because the model has too few positions.
        generated_tokens: the one that ends a text included; None if the request failed.
        prediction: what the model wrote.
        error: why there is none; empty otherwise.
    """

    index: int
    prompt_tokens: int
    cut_tokens: int
    generated_tokens: int | None
    prediction: str
    error: str


@dataclass(frozen=True)
class Written:
    """All that a model wrote.

    Attributes:
        pairs: sources and references.
        samples: one for each, in order.
        elapsed_ns: from the first request to the last answer.
    """

    pairs: Sequence[Pair]
    samples: Sequence[TextSample]
    elapsed_ns: int

    @property
    def answered(self) -> list[tuple[str, str]]:
        """Prediction and reference, where a prediction came back."""
        pairs = zip(self.samples, self.pairs, strict=True)
        return [(sample.prediction, pair.reference) for sample, pair in pairs if not sample.error]


Scored = tuple[list[Metric], Sequence[Any], dict[str, Any]]
"""A task's figures, its samples, and what its figures rest on."""


def run_text_task(task: str, arguments: TextPairArguments, score: Callable[[Written], Scored]) -> None:
    """Ask for every text, score, write the results, and fail if any text has none.

    Args:
        task: its name.
        arguments: how to ask, and for what.
        score: computes the task's figures.
    """
    pairs, template = check_pairs(arguments)
    target = find_target(task, arguments)
    tokenizer = find_tokenizer(target, arguments.tokenizer)
    prompter = Prompter(template, tokenizer, target, arguments.max_output_len)
    prompts = [prompter.write({"source": pair.source}) for pair in pairs]
    sampling = Sampling(beam_width=arguments.beam_width)
    completer = Completer(target, arguments, tokenizer, arguments.max_output_len, sampling=sampling)
    first = next((prompt for prompt in prompts if not prompt.problem), prompts[0])
    if isinstance(warm := completer.complete([first])[0], str):  # nothing is timed before an answer came back
        raise ServerError(f"no text came back: {warm}")
    started = time.monotonic_ns()
    answers = completer.complete(prompts)
    elapsed_ns = time.monotonic_ns() - started
    samples = [
        _sample(index, len(prompt.ids), prompt.cut_tokens, answer, template.read_answer)
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    written = Written(pairs, samples, elapsed_ns)
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
    arguments.output.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{' '.join(sample.prediction.split())}\n" for sample in samples)
    write_atomically(arguments.output / PREDICTIONS_NAME, lines)
    outcome.write(arguments.output, arguments.model, target.served)
    outcome.show()


def _sample(index: int, given: int, cut: int, answer: Answer | str, read: Callable[[str], str]) -> TextSample:
    if isinstance(answer, str):
        return TextSample(index, given, cut, None, "", answer)
    return TextSample(index, given, cut, answer.generated, read(answer.text), "")


def _speed(written: Written) -> Metric:
    """Tokens generated per second of the whole run, the requests' concurrency included; failed texts bring none."""
    counts = [sample.generated_tokens for sample in written.samples if sample.generated_tokens is not None]
    value = sum(counts) * NANOSECONDS_PER_S / written.elapsed_ns if counts else None
    definition = (
        "tokens generated, those that end a text included, per second from the first request to the last answer"
    )
    return Metric("tokens_per_s", value, "tokens/s", None, len(counts), len(written.samples) - len(counts), definition)


def _data(arguments: TextPairArguments) -> dict[str, str]:
    digests = [file_digest(path).removeprefix("sha256:") for path in arguments.data_files]
    return {"file": " ".join(path.name for path in arguments.data_files), "sha256": " ".join(digests), "known_as": ""}
