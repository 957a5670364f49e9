"""Lengths, prompts and arrival times of a load, which depend on the seed and the point alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handover.errors import ConfigError
from handover.regular_file import read_text

if TYPE_CHECKING:  # the login node checks lengths and has neither package
    import numpy as np

    from evaluation.client.tokenizer import Tokenizer

_FEWEST_WORDS = 16

_HINT = "a length is a number of tokens, uniform:LOW:HIGH or normal:MEAN:DEVIATION; a pair is INPUT/OUTPUT"


@dataclass(frozen=True)
class LoadPrompt:
    """The prompt of one request, with the length of its answer.

    Attributes:
        ids: token ids of the prompt.
        output_length: number of tokens to generate.
        text: the prompt as text, for a text model; empty if unknown.
    """

    ids: tuple[int, ...]
    output_length: int
    text: str = ""


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of lengths in tokens.

    Attributes:
        kind: constant, uniform (both ends included) or normal (rounded, at least 1).
        first: the length, the lowest, or the mean.
        second: unused, the highest, or the standard deviation.
    """

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> LengthDistribution:
        """Read ``60``, ``uniform:20:400`` or ``normal:100:20``.

        Raises:
            ConfigError: the text is none of these, or a length could be below 1.
        """
        words = text.strip().split(":")
        kind = "constant" if len(words) == 1 else words[0]
        try:
            numbers = [float(word) for word in (words if len(words) == 1 else words[1:])]
        except ValueError:
            numbers = []
        if len(numbers) != {"constant": 1, "uniform": 2, "normal": 2}.get(kind) or not all(map(math.isfinite, numbers)):
            raise ConfigError(f"'{text}' is no length", _HINT)
        lengths = cls(kind, *numbers)
        if lengths.first < 1 or lengths.second < (lengths.first if kind == "uniform" else 0):
            raise ConfigError(f"'{text}' is no length: it would be below 1, or its ends are swapped", _HINT)
        return lengths

    def draw(self, random: np.random.Generator) -> int:
        """Draw one length."""
        if self.kind == "uniform":
            return int(random.integers(int(self.first), int(self.second), endpoint=True))
        if self.kind == "normal":
            return max(1, round(random.normal(self.first, self.second)))
        return int(self.first)


@dataclass(frozen=True)
class Workload:
    """Lengths of prompts and answers, as ``60/20``."""

    name: str
    input: LengthDistribution
    output: LengthDistribution

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read ``INPUT/OUTPUT``.

        Raises:
            ConfigError: the text is no such pair.
        """
        parts = text.split("/")
        if len(parts) != 2:
            raise ConfigError(f"'{text}' is no pair of lengths", _HINT)
        return cls(text, *map(LengthDistribution.parse, parts))

    def prompts(self, vocab_size: int, random: np.random.Generator) -> Iterator[LoadPrompt]:
        """Draw prompts of random tokens, without end."""
        while True:
            ids = random.integers(0, vocab_size, self.input.draw(random)).tolist()
            yield LoadPrompt(tuple(ids), self.output.draw(random))


class Words:
    """Words that are one token each, so that a text of n words has n tokens.

    Args:
        tokenizer: tokenizer of the served model.
        vocab_size: size of the vocabulary.

    Raises:
        ConfigError: the vocabulary has fewer than 16 such words.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        spelt = {word: number for number in range(vocab_size) if (word := tokenizer.decode([number]).strip()).isalpha()}
        # A word must be one token after another word as well; every tokenizer has the word "a".
        before = tokenizer.encode("a")
        self._words = [word for word, number in spelt.items() if tokenizer.encode(f"a {word}") == [*before, number]]
        if len(self._words) < _FEWEST_WORDS:
            raise ConfigError(
                "the served model's vocabulary has no words to make prompts of",
                "give texts: benchmark.load.prompt_file",
            )

    def prompts(self, workload: Workload, random: np.random.Generator) -> Iterator[LoadPrompt]:
        """Draw prompts, without end; the ids of a prompt are those of its text."""
        while True:
            wanted = workload.input.draw(random)
            drawn = [self._words[i] for i in random.integers(0, len(self._words), wanted)]
            text = " ".join(drawn)
            # The first word has no space before it and may be more than one token.
            while len(drawn) > 1 and len(self._tokenizer.encode(text)) > wanted:
                text = " ".join(drawn := drawn[:-1])
            yield LoadPrompt(tuple(self._tokenizer.encode(text)), workload.output.draw(random), text)


def seeded(seed: int, *point: object) -> np.random.Generator:
    """Make a generator that depends on the seed and the point only, so that two deployments get the same requests."""
    import numpy

    return numpy.random.default_rng([seed, *json.dumps(point).encode()])


def arrivals_ns(rate_per_s: float, arrival: str, ramp_s: float, random: np.random.Generator) -> Iterator[int]:
    """Yield the due times of requests in nanoseconds after the start, without end.

    Events of a process of rate 1 (exponential gaps, or one a second) are moved to the time at which the integral of the
    wanted rate reaches theirs; during the ramp the rate grows linearly from 0.

    Args:
        rate_per_s: rate after the ramp.
        arrival: poisson or constant.
        ramp_s: length of the ramp in seconds; 0 for none.
        random: generator of the Poisson process.
    """
    in_ramp = rate_per_s * ramp_s / 2
    event = 0.0
    for number in count(1):
        event = event + float(random.exponential()) if arrival == "poisson" else float(number)
        if event < in_ramp:
            due_s = math.sqrt(2 * event * ramp_s / rate_per_s)
        else:
            due_s = ramp_s + (event - in_ramp) / rate_per_s
        yield round(due_s * 1e9)


def read_prompt_file(
    path: Path, encode: Callable[[str], list[int]] | None, max_tokens: int | None
) -> tuple[list[LoadPrompt], int]:
    """Read JSON lines of prompts.

    A line holds ``input_ids`` or ``prompt`` with ``output_length`` (tokens), or ``prompt`` and ``completion``, or
    ShareGPT's ``conversations``, whose first two turns are the prompt and, by its length, the answer.

    Args:
        path: path of the file.
        encode: encodes with the served model's tokenizer; None without one.
        max_tokens: positions of the model; longer lines are left out.

    Returns:
        The prompts, and the number of lines that were left out because they have no answer or do not fit.

    Raises:
        ConfigError: a line is none of these or needs a tokenizer that is missing, or no line is left.
    """
    prompts, left_out = [], 0
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        prompt = _prompt(line, f"{path.name}:{number}", encode)
        if prompt is None or (max_tokens is not None and len(prompt.ids) + prompt.output_length > max_tokens):
            left_out += 1
        else:
            prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} has no prompt that fits the model ({left_out} lines left out)")
    return prompts, left_out


def _prompt(line: str, where: str, encode: Callable[[str], list[int]] | None) -> LoadPrompt | None:
    """Read one line; None for a conversation without an answer."""
    try:
        content: dict[str, Any] = json.loads(line)
        turns = content.get("conversations")
        if turns is not None:
            if len(turns) < 2:
                return None
            content = {"prompt": turns[0]["value"], "completion": turns[1]["value"]}
        if "input_ids" in content:
            return _checked(tuple(map(int, content["input_ids"])), int(content["output_length"]))
        if encode is None:
            raise ConfigError(f"{where} holds text, but the served model's tokenizer is not on this machine")
        around = len(encode(""))  # start and end tokens are no part of an answer
        wanted = content["output_length"] if "output_length" in content else len(encode(content["completion"])) - around
        return _checked(tuple(encode(content["prompt"])), int(wanted), content["prompt"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where} is no prompt: {error!r}",
            "give input_ids and output_length, prompt and output_length or completion, or conversations",
        ) from error


def _checked(ids: tuple[int, ...], output_length: int, text: str = "") -> LoadPrompt | None:
    return LoadPrompt(ids, output_length, text) if ids and output_length >= 1 else None
