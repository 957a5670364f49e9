"""What types and numbers a setting may have: declared beside its type, enforced in one place. Standard library only."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from handover.errors import ConfigError, shortened
from models.checks import Range

RANGE = "range"
"""Key of a dataclass field's metadata that holds its ``Range``."""


PARALLEL = Range(1, 1024)  # ranks of one model
FLAG = Range(0, 1)
GPUS = Range(0, 1024)  # of a node
SESSIONS = Range(0, 1_000_000)
BATCH = Range(1, 65_536)  # sequences a request
TOKENS = Range(1, 1_048_576)  # of one sequence
BEAMS = Range(1, 256)
COUNT = Range(1, 1_000_000_000)  # of what is in a file
REPEATS = Range(1, 1_000_000)
UNCOUNTED = Range(0, 100_000_000)  # requests; 0 has a meaning of its own
CHUNK = Range(0, 1_048_576)  # tokens of a step; 0: prompts are run whole
IN_FLIGHT = Range(1, 1_000_000)  # requests at a time
DRAFT = Range(1, 64)  # tokens that are drafted for a step
ADAPTERS = Range(0, 64)  # on a GPU at once; 0: none can be loaded
ADAPTER_RANK = Range(1, 256)
INSTANCES = Range(1, 64)  # processes of one Triton model
PROCESSES = Range(1, 4096)
BODY_BYTES = Range(1, 2**31 - 1)  # of a request, which is in memory
FILE_BYTES = Range(1, 1_000_000_000_000)
LOG_BYTES = Range(1, 2**31 - 1)  # of a file that is written while requests come
REPLICAS = Range(1, 256)  # servers behind one router
PORT = Range(0, 65_535)
IDS = Range(1, 2**31 - 1)  # of a vocabulary: token ids have 32 bits
TOKEN_ID = Range(0, 2**31 - 1)
SEED = Range(0, 2**31 - 1)
RATE = Range(0, 1_000_000, is_above=True)  # requests per second
PRICE = Range(0, 1_000_000, is_above=True)  # of a GPU for an hour, in any currency
PERCENTILE = Range(50, 99.9)
PRECISION = Range(0.001, 1)  # of a search, relative
SPEED = Range(0, 10_000, is_above=True)  # of a recorded trace
DAY_S = Range(0, 86_400)
WEEK_S = Range(0, 604_800, is_above=True)
YEAR_S = Range(0, 31_536_000, is_above=True)
LIMIT_S = Range(0, 31_536_000)
DAY_MS = Range(0, 86_400_000, is_above=True)
TEN_MINUTES_US = Range(0, 600_000_000)
RELATIVE = Range(0, 100)
SHARE = Range(0, 1)
MOST_SHARE = Range(0, 0.99)
NATS = Range(0, 1_000_000)
PASSAGES = Range(0, 1_000_000)  # 0: none
PASSAGE_TOKENS = Range(2, 1_048_576)  # the first is not scored
RATIO = Range(1, 1000)
CHANCE = Range(1e-12, 0.5)  # of a false alarm
SCALE_ERROR = Range(0, 1, is_above=True)


def number(default: Any, allowed: Range, **metadata: Any) -> Any:
    """Declare a dataclass field of a number, or of a list of them, with what is legal.

    Args:
        default: of the field; a list is copied.
        allowed: each number; None is legal where the type says so.
        metadata: more of it, such as ``help``.
    """
    metadata[RANGE] = allowed
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_ranges(settings: Any, place: str = "") -> None:
    """Hold every number of a dataclass, and of those in it, against its range.

    Args:
        settings: an instance.
        place: what its keys stand below, with a dot at the end.

    Raises:
        ConfigError: a number is out of range.
    """
    for entry in dataclasses.fields(settings):
        value, allowed = getattr(settings, entry.name), entry.metadata.get(RANGE)
        key = f"{place}{entry.name}"
        if allowed is not None:
            for one in _numbers(value):
                if one not in allowed:
                    says = "is" if one is value else f"is {shortened(str(value))}, which holds"
                    raise ConfigError(f"{key} {says} {shortened(str(one))}", f"it is {allowed}")
        for name, section in _sections(value):
            check_ranges(section, f"{key}{name}.")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a field's type, with what it holds: true and false are no numbers."""
    arms = typing.get_args(hint)
    match typing.get_origin(hint):
        case types.UnionType | typing.Union:
            return any(fits(value, arm) for arm in arms)
        case list_ if list_ is list:
            return isinstance(value, list) and all(fits(one, arms[0]) for one in value)
        case tuple_ if tuple_ is tuple and arms[-1] is ...:
            return isinstance(value, tuple) and all(fits(one, arms[0]) for one in value)
        case tuple_ if tuple_ is tuple:
            return isinstance(value, tuple) and len(arms) == len(value) and all(map(fits, value, arms))
        case dict_ if dict_ is dict:
            return isinstance(value, dict) and all(fits(name, arms[0]) for name in value)
    if hint is Any:
        return all(map(is_scalar, value)) if isinstance(value, list) else is_scalar(value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def is_scalar(value: Any) -> bool:
    """Whether it is one value: no list and no mapping."""
    return value is None or isinstance(value, (str, int, float, bool))


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _sections(value: Any) -> Iterator[tuple[str, Any]]:
    """Dataclasses that a value is or holds by name."""
    if dataclasses.is_dataclass(value):
        yield "", value
    elif isinstance(value, Mapping):
        yield from ((f".{name}", one) for name, one in value.items() if dataclasses.is_dataclass(one))
