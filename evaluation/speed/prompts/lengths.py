"""Distributions of lengths in tokens, and tables of lengths that real services and data sets have."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from handover.errors import ConfigError

if TYPE_CHECKING:  # the login node checks lengths and has no numpy
    import numpy as np

LENGTH_HINT = (
    "a length is a number of tokens, uniform:LOW:HIGH, normal:MEAN:DEVIATION or lognormal:MEDIAN:SIGMA; "
    "a pair is INPUT/OUTPUT"
)
_NUMBERS = {"constant": 1, "uniform": 2, "normal": 2, "lognormal": 2}
_WIDEST_SIGMA = 5.0
_PERCENTS = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 99.9, 100)


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of lengths in tokens.

    Attributes:
        kind: constant, uniform (both ends included), normal or lognormal (both rounded, at least 1), or table.
        first: the length, the lowest, the mean, or the median.
        second: unused, the highest, the standard deviation, or the standard deviation of the logarithm.
        quantiles: of a table: the lengths at _PERCENTS, between which lengths are interpolated.
        most: longest length of a lognormal distribution; longer draws become it. 0 for no limit.
    """

    kind: str
    first: float
    second: float = 0.0
    quantiles: tuple[int, ...] = ()
    most: int = 0

    @classmethod
    def parse(cls, text: str) -> LengthDistribution:
        """Read ``60``, ``uniform:20:400``, ``normal:100:20`` or ``lognormal:100:0.8``.

        Raises:
            ConfigError: the text is none of these, or a length could be below 1.
        """
        words = text.strip().split(":")
        kind = "constant" if len(words) == 1 else words[0]
        try:
            numbers = [float(word) for word in (words if len(words) == 1 else words[1:])]
        except ValueError:
            numbers = []
        if len(numbers) != _NUMBERS.get(kind) or not all(map(math.isfinite, numbers)):
            raise ConfigError(f"'{text}' is no length", LENGTH_HINT)
        lengths = cls(kind, numbers[0], sum(numbers[1:]))
        if lengths.first < 1 or lengths.second < (lengths.first if kind == "uniform" else 0):
            raise ConfigError(f"'{text}' is no length: it would be below 1, or its ends are swapped", LENGTH_HINT)
        if kind == "lognormal" and lengths.second > _WIDEST_SIGMA:
            raise ConfigError(f"'{text}' is no length: its SIGMA is above {_WIDEST_SIGMA:g}", LENGTH_HINT)
        return lengths

    @property
    def is_long_tailed(self) -> bool:
        """Whether it may draw more tokens than a model has positions for although it usually does not."""
        return self.kind in ("lognormal", "table")

    def draw(self, random: np.random.Generator) -> int:
        """Draw one length."""
        if self.kind == "uniform":
            return int(random.integers(int(self.first), int(self.second), endpoint=True))
        if self.kind == "normal":
            return max(1, round(random.normal(self.first, self.second)))
        if self.kind == "lognormal":
            drawn = max(1, round(math.exp(random.normal(math.log(self.first), self.second))))
            return min(drawn, self.most) if self.most else drawn
        if self.kind == "table":
            return _interpolate(100 * float(random.random()), self.quantiles)
        return int(self.first)


def _interpolate(percent: float, quantiles: tuple[int, ...]) -> int:
    above = max(1, bisect_left(_PERCENTS, percent))
    low, high = _PERCENTS[above - 1], _PERCENTS[above]
    share = (percent - low) / (high - low)
    return max(1, round(quantiles[above - 1] + share * (quantiles[above] - quantiles[above - 1])))


@dataclass(frozen=True)
class NamedLengths:
    """Lengths of prompts and answers that a real service or data set has.

    Attributes:
        input, output: the distributions, drawn independently of each other.
        source: what they were taken from, for people.
    """

    input: LengthDistribution
    output: LengthDistribution
    source: str


def _table(*quantiles: int) -> LengthDistribution:
    return LengthDistribution("table", quantiles[_PERCENTS.index(50)], quantiles=quantiles)


def _lognormal(median: float, sigma: float, most: int = 0) -> LengthDistribution:
    return LengthDistribution("lognormal", median, sigma, most=most)


NAMED_LENGTHS = {
    "sharegpt": NamedLengths(
        _table(1, 12, 29, 74, 382, 777, 1203, 1730, 2401, 3235, 4278, 5696, 6563, 7434, 7854, 8141),
        _table(2, 6, 44, 84, 181, 271, 346, 415, 493, 581, 683, 834, 920, 998, 1021, 1024),
        "quantiles of 30,731 rounds of ShareGPT conversations whose prompts hold the rounds before (Llama 2 tokens, at "
        "most 8,192), as published with Sarathi-Serve (OSDI 2024)",
    ),
    "chat_log": NamedLengths(
        _table(2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 6179, 14050),
        _table(7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 954, 1000),
        "quantiles of 19,366 requests of Azure's LLM inference trace 2023, conversation, published with Splitwise "
        "(ISCA 2024)",
    ),
    "long_document": NamedLengths(
        _lognormal(7059, 0.4756),
        _lognormal(208, 0.4516),
        "log-normal through the median and 90th percentile of arXiv summarization in Sarathi-Serve's table 2: 7059 and "
        "12985 tokens in, 208 and 371 out",
    ),
    "cnn_dailymail": NamedLengths(
        _lognormal(697, 0.47, most=2540),
        LengthDistribution("constant", 128),
        "log-normal about the mean of CNN/DailyMail's articles (some 780 tokens); every answer has the 128 tokens that "
        "MLPerf's summarization allows",
    ),
    "open_orca": NamedLengths(
        _lognormal(150, 1.0, most=1024),
        _lognormal(222, 0.8, most=1024),
        "log-normal: at most 1024 tokens each way and 294 tokens an answer in the mean, as MLPerf's OpenOrca samples; "
        "the shape of the prompts' lengths is assumed",
    ),
}
"""Lengths by the name that ``load.lengths`` takes."""
