"""Bodies of requests with a place that is wrong."""

from __future__ import annotations

import random
from typing import Any

SPOILS: list[Any] = [
    None,
    0,
    -1,
    1e308,
    "",
    "\ud800",
    "a" * 300,
    [],
    {},
    [[]],
    {"a": None},
    True,
    "<tool_call>",
    {"type": 3},
]


def spoilt(value: Any, draw: random.Random) -> Any:
    """The value with one place of it replaced, left out or doubled."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        if draw.random() < 0.15:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: spoilt(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        index = draw.randrange(len(value))
        return [*value[:index], spoilt(value[index], draw), *value[index + draw.randint(0, 1) :]]
    return draw.choice(SPOILS)
