"""The registry of the steps that all processes take together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Step = TypeVar("_Step", bound=Callable[..., Any])
COLLECTIVE_STEPS: dict[str, Callable[..., Any]] = {}


def collective_step(step: _Step) -> _Step:
    """Register a method that all processes call together; see Steps.collective."""
    COLLECTIVE_STEPS[step.__name__] = step
    return step
