"""What a load asks and when: prompts, their lengths and arrival times, which depend on the seed and the point alone.

A workload draws prompts without end. One that has several turns draws the first turn, which the later ones follow.
"""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol

from evaluation.speed.prompts.lengths import LENGTH_HINT, NAMED_LENGTHS, LengthDistribution
from handover.errors import ConfigError

if TYPE_CHECKING:  # the login node checks workloads and has no numpy
    import numpy as np

_SHARED, _AGENT = "shared_prefix", "agent"
_MOST_TURNS = 1000
_MOST_GROUPS = 100_000
WORKLOAD_HINT = (
    f"a workload is INPUT/OUTPUT, {_SHARED}:PREFIX[xGROUPS]:INPUT/OUTPUT, {_AGENT}:TURNS:INPUT/OUTPUT, or one of "
    f"{', '.join(NAMED_LENGTHS)}; {LENGTH_HINT}"
)


@dataclass(frozen=True)
class LoadPrompt:
    """The prompt of one request, with the length of its answer.

    Attributes:
        output_length: number of tokens to generate.
        text: the prompt as text, for a text model; empty if unknown.
        is_clipped: whether it, its answer, or its conversation was made shorter to fit the model's positions.
        cancel_after: tokens of the answer after which the client hangs up; 0 for never.
        think_s: seconds between the answer of the turn before and this request.
        follow_up: the next turn of the same conversation, which is sent after the answer; None for the last.
    """

    ids: tuple[int, ...]
    output_length: int
    text: str = ""
    is_clipped: bool = False
    cancel_after: int = 0
    think_s: float = 0.0
    follow_up: LoadPrompt | None = None


class Tokens(Protocol):
    """What prompts are made of: random ids, or words that are one token each."""

    def draw(self, number: int, random: np.random.Generator) -> list[int]:
        """Draw tokens."""

    def prompt(self, tokens: Sequence[int], output_length: int) -> LoadPrompt:
        """Make a prompt of drawn tokens."""


@dataclass(frozen=True)
class DrawingContext:
    """What prompts are drawn from and must fit into.

    Attributes:
        tokens: draws tokens and makes prompts of them.
        random: generator of the point.
        most: positions of the model; None where they are unknown.
        think_s: mean of the exponentially distributed time between turns.
    """

    tokens: Tokens
    random: np.random.Generator
    most: int | None = None
    think_s: float = 0.0


@dataclass(frozen=True)
class Workload(ABC):
    """Prompts of one kind; the name is what the user wrote."""

    name: str

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read what WORKLOAD_HINT describes.

        Raises:
            ConfigError: the text is no workload.
        """
        kind, _, rest = text.partition(":")
        if kind == _SHARED:
            return SharedPrefix.read(text, rest)
        if kind == _AGENT:
            return Agent.read(text, rest)
        return LengthPair.read(text, text)

    @abstractmethod
    def prompts(self, context: DrawingContext) -> Iterator[LoadPrompt]:
        """Draw prompts, without end."""


@dataclass(frozen=True)
class LengthPair(Workload):
    """Prompts that have nothing in common, with lengths of prompts and answers as ``60/20``."""

    input: LengthDistribution
    output: LengthDistribution

    @classmethod
    def read(cls, name: str, text: str) -> LengthPair:
        """Read ``INPUT/OUTPUT`` or the name of known lengths."""
        known = NAMED_LENGTHS.get(text.strip())
        if known is not None:
            return cls(name, known.input, known.output)
        parts = text.split("/")
        if len(parts) != 2:
            raise ConfigError(f"'{name}' is no pair of lengths", WORKLOAD_HINT)
        return cls(name, *map(LengthDistribution.parse, parts))

    def prompts(self, context: DrawingContext) -> Iterator[LoadPrompt]:
        """Draw prompts of random tokens."""
        most = context.most if self.input.is_long_tailed or self.output.is_long_tailed else None
        while True:
            wanted = self.input.draw(context.random)
            ids = context.tokens.draw(wanted, context.random)
            length, answer = fit_lengths(wanted, drawn := self.output.draw(context.random), most)
            prompt = context.tokens.prompt(ids[:length], answer)
            yield dataclasses.replace(prompt, is_clipped=True) if (length, answer) != (wanted, drawn) else prompt


@dataclass(frozen=True)
class SharedPrefix(Workload):
    """Prompts of which each group has one beginning, as requests with the same system prompt.

    Attributes:
        prefix: tokens of each group's beginning.
        groups: number of beginnings; a prompt takes one of them at random.
        own: lengths of what follows the beginning, and of the answers.
    """

    prefix: int
    groups: int
    own: LengthPair

    @classmethod
    def read(cls, name: str, text: str) -> SharedPrefix:
        """Read ``PREFIX[xGROUPS]:INPUT/OUTPUT``."""
        size, _, rest = text.partition(":")
        prefix, x, groups = size.partition("x")
        return cls(
            name,
            _whole(name, prefix, "PREFIX", 2**20),
            _whole(name, groups, "GROUPS", _MOST_GROUPS) if x else 1,
            LengthPair.read(name, rest),
        )

    def prompts(self, context: DrawingContext) -> Iterator[LoadPrompt]:
        """Draw the beginnings, and prompts that have one of them."""
        tokens, random = context.tokens, context.random
        beginnings = [tokens.draw(self.prefix, random) for _ in range(self.groups)]
        while True:
            beginning = beginnings[int(random.integers(0, self.groups))]
            ids = [*beginning, *tokens.draw(self.own.input.draw(random), random)]
            yield tokens.prompt(ids, self.own.output.draw(random))


@dataclass(frozen=True)
class Agent(Workload):
    """Conversations whose every prompt is the prompt before, its answer, and new tokens.

    The answer in the next prompt is drawn at random and has the length of the real one, so that every deployment gets
    the same requests.

    Attributes:
        most_turns: requests of a conversation; fewer where no further turn fits the model's positions.
        new: lengths of the tokens that are new in each turn, and of the answers.
    """

    most_turns: int
    new: LengthPair

    @classmethod
    def read(cls, name: str, text: str) -> Agent:
        """Read ``TURNS:INPUT/OUTPUT``."""
        turns, _, rest = text.partition(":")
        return cls(name, _whole(name, turns, "TURNS", _MOST_TURNS), LengthPair.read(name, rest))

    def prompts(self, context: DrawingContext) -> Iterator[LoadPrompt]:
        """Draw conversations."""
        while True:
            turns = list(self._conversation(context))
            if len(turns) < self.most_turns:
                turns[-1] = dataclasses.replace(turns[-1], is_clipped=True)
            following: LoadPrompt | None = None
            for turn in reversed(turns):
                following = dataclasses.replace(turn, follow_up=following)
            assert following is not None
            yield following

    def _conversation(self, context: DrawingContext) -> Iterator[LoadPrompt]:
        random, ids = context.random, list[int]()
        for turn in range(self.most_turns):
            new, answer = self.new.input.draw(random), self.new.output.draw(random)
            if turn and context.most is not None and len(ids) + new + answer > context.most:
                return
            new, answer = fit_lengths(new, answer, context.most)
            ids += context.tokens.draw(new, random)
            think_s = float(random.exponential(context.think_s)) if turn and context.think_s else 0.0
            yield dataclasses.replace(context.tokens.prompt(ids, answer), think_s=think_s)
            ids += context.tokens.draw(answer, random)


def fit_lengths(prompt: int, answer: int, most: int | None) -> tuple[int, int]:
    """Shorten a prompt, and an answer that alone has too many tokens, to the positions of the model.

    Args:
        prompt: number of tokens of the prompt.
        answer: number of tokens to generate.
        most: positions of the model; None for no limit.
    """
    if most is None or prompt + answer <= most:
        return prompt, answer
    answer = min(answer, max(1, most - 1))
    return max(1, min(prompt, most - answer)), answer


def _whole(name: str, text: str, what: str, most: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigError(f"'{name}': {what} '{text}' is no whole number from 1 to {most}", WORKLOAD_HINT)
    return int(text)


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
