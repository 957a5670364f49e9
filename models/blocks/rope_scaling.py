"""How the angles of a rotation are scaled, so that texts can be longer than those of the first training.

Keys, defaults and formulas: transformers, ``modeling_rope_utils.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log, pi, sqrt
from typing import Any, ClassVar

from models.blocks.rope_keys import ATTENTION, ORIGINAL, Said

_FAST, _SLOW, _TRUNCATE = "beta_fast", "beta_slow", "truncate"
_MSCALES = ("mscale", "mscale_all_dim")


class Scaling(ABC):
    """One way to scale the angles."""

    kind: ClassVar[str]

    @classmethod
    @abstractmethod
    def read(cls, said: Said) -> Scaling:
        """Read it.

        Raises:
            ModelError: a value that none can have.
        """

    @abstractmethod
    def write(self) -> dict[str, Any]:
        """Write it, without its kind."""

    @abstractmethod
    def frequencies(self, plain: Sequence[float], base: float) -> list[float]:
        """Scale angles from one position to the next."""

    def attention_factor(self, longest: int) -> float:
        """Return what sines and cosines are multiplied by; ``longest`` is the longest text of the model."""
        return 1.0

    def problem(self, width: int, base: float) -> str:
        """Return why a rotation cannot be scaled so; empty: it can."""
        return ""


@dataclass(frozen=True)
class Linear(Scaling):
    """Positions are divided by a factor."""

    factor: float
    kind = "linear"

    @classmethod
    def read(cls, said: Said) -> Linear:
        return cls(said.above_zero("factor"))

    def write(self) -> dict[str, Any]:
        return {"factor": self.factor, "type": self.kind}  # Gemma 3's older readers know this word alone

    def frequencies(self, plain: Sequence[float], base: float) -> list[float]:
        return [each / self.factor for each in plain]


@dataclass(frozen=True)
class Dynamic(Scaling):
    """The base grows with a text that is longer than the model's longest; up to there angles are as they are."""

    factor: float
    kind = "dynamic"

    @classmethod
    def read(cls, said: Said) -> Dynamic:
        return cls(said.above_zero("factor"))

    def write(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def frequencies(self, plain: Sequence[float], base: float) -> list[float]:
        return list(plain)

    def problem(self, width: int, base: float) -> str:
        return "" if width > 2 else "it needs more than 2 elements of a head"


@dataclass(frozen=True)
class Llama3(Scaling):
    """Llama 3.1's: long waves are divided.

    Attributes:
        factor: what they are divided by.
        low_freq_factor, high_freq_factor: waves that fit into original_max_position less often than the first are
            divided, those that fit more often than the second are not, and the others are in between; both are one
            number where none is, as in Llama 4 Scout.
        original_max_position: of the model before its context was extended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int
    kind = "llama3"

    @classmethod
    def read(cls, said: Said) -> Llama3:
        low, high = said.above_zero("low_freq_factor"), said.above_zero("high_freq_factor")
        return cls(said.above_zero("factor"), low, high, said.original())

    def write(self) -> dict[str, Any]:
        ends = {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        return {"factor": self.factor, **ends, ORIGINAL: self.original_max_position}

    def frequencies(self, plain: Sequence[float], base: float) -> list[float]:
        low, reach = self.low_freq_factor, self.high_freq_factor - self.low_freq_factor

        def scaled(each: float) -> float:
            turns = self.original_max_position * each / (2 * pi)
            kept = min(max((turns - low) / reach, 0.0), 1.0) if reach else float(turns >= low)
            return each * (kept + (1 - kept) / self.factor)

        return [scaled(each) for each in plain]

    def problem(self, width: int, base: float) -> str:
        return "" if self.low_freq_factor <= self.high_freq_factor else "low_freq_factor is above high_freq_factor"


@dataclass(frozen=True)
class Yarn(Scaling):
    """YaRN's: long waves are divided, by a ramp over the elements of a head.

    Attributes:
        factor: what they are divided by.
        original_max_position: of the model before its context was extended.
        beta_fast, beta_slow: waves that turn more often than the first within that length are not divided, those that
            turn less often than the second are.
        said_attention_factor: None: it follows from the factor and, where both are set, from the next two.
        mscale, mscale_all_dim: 0: not set.
        truncate: whether the ramp begins and ends at whole elements.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    said_attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    kind = "yarn"

    @classmethod
    def read(cls, said: Said) -> Yarn:
        return cls(
            factor=said.factor(),
            original_max_position=said.original(),
            beta_fast=said.unless_said(_FAST, 32.0),
            beta_slow=said.unless_said(_SLOW, 1.0),
            said_attention_factor=said.attention_factor(),
            mscale=said.unless_said("mscale", 0.0),
            mscale_all_dim=said.unless_said("mscale_all_dim", 0.0),
            truncate=bool(said.rope.get(_TRUNCATE, True)),
        )

    def write(self) -> dict[str, Any]:
        said: dict[str, Any] = {"factor": self.factor, ORIGINAL: self.original_max_position}
        said |= {_FAST: self.beta_fast, _SLOW: self.beta_slow}
        if self.said_attention_factor is not None:
            said[ATTENTION] = self.said_attention_factor
        said |= {key: getattr(self, key) for key in _MSCALES if getattr(self, key)}
        return said if self.truncate else {**said, _TRUNCATE: False}

    def frequencies(self, plain: Sequence[float], base: float) -> list[float]:
        width = 2 * len(plain)
        low, high = (self._element(turns, width, base) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        reach = high - low or 0.001
        divided = (min(max((index - low) / reach, 0.0), 1.0) for index in range(len(plain)))
        return [each * (1 - part + part / self.factor) for each, part in zip(plain, divided, strict=True)]

    def _element(self, turns: float, width: int, base: float) -> float:
        """Return which element's wave turns so often in the original length."""
        return width * log(self.original_max_position / (turns * 2 * pi)) / (2 * log(base))

    def attention_factor(self, longest: int) -> float:
        if self.said_attention_factor is not None:
            return self.said_attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.grown(self.mscale) / self.grown(self.mscale_all_dim)
        return self.grown(1.0)

    def grown(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * log(self.factor) + 1.0

    def problem(self, width: int, base: float) -> str:
        return "" if base > 1 else "its base is above 1"


@dataclass(frozen=True)
class LongRope(Scaling):
    """LongRoPE's: a divisor for each wave, of texts up to the original length and of longer ones.

    Attributes:
        short, long: divisors.
        original_max_position: that length.
        factor: of the lengths; None: what they are.
        said_attention_factor: None: it follows from the factor and the original length.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    factor: float | None = None
    said_attention_factor: float | None = None
    kind = "longrope"

    @classmethod
    def read(cls, said: Said) -> LongRope:
        short, long = said.numbers("short_factor"), said.numbers("long_factor")
        factor = None if said.rope.get("factor") is None else said.above_zero("factor")
        return cls(short, long, said.original(), factor, said.attention_factor())

    def write(self) -> dict[str, Any]:
        said = {"short_factor": list(self.short), "long_factor": list(self.long), ORIGINAL: self.original_max_position}
        more = {"factor": self.factor, ATTENTION: self.said_attention_factor, "type": self.kind}  # for older readers
        return said | {key: value for key, value in more.items() if value is not None}

    def frequencies(self, plain: Sequence[float], base: float) -> list[float]:
        """Scale them for texts up to the original length."""
        return [each / divisor for each, divisor in zip(plain, self.short, strict=True)]

    def attention_factor(self, longest: int) -> float:
        if self.said_attention_factor is not None:
            return self.said_attention_factor
        factor = self.factor or longest / self.original_max_position
        return 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(self.original_max_position))

    def problem(self, width: int, base: float) -> str:
        if {len(self.short), len(self.long)} != {width // 2}:
            return f"short_factor and long_factor list {len(self.short)} and {len(self.long)} waves of {width // 2}"
        return "" if self.original_max_position > 1 else f"{ORIGINAL} is above 1"


SCALINGS: Mapping[str, type[Scaling]] = {each.kind: each for each in (Linear, Dynamic, Llama3, Yarn, LongRope)}
"""By transformers' ``rope_type``."""
