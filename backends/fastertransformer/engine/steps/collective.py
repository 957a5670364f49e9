"""Steps that all processes take together: rank 0 announces each one to the others before it takes it; see ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

_Step = TypeVar("_Step", bound=Callable[..., Any])


class Collective:
    """What has methods that all processes call together.

    Attributes:
        announce: announces a step, takes it, and returns its result, given the method, its object and its arguments; in
            rank 0 of several processes. None: this is the only process, or not rank 0.
    """

    announce: Callable[[Callable[..., Any], Any, tuple[Any, ...]], Any] | None = None

    @property
    def collective(self) -> dict[str, Callable[..., Any]]:
        """By name, the methods that all processes call together."""
        names = (name for each in type(self).__mro__ for name, value in vars(each).items() if hasattr(value, "is_step"))
        return {name: getattr(self, name) for name in names}


def collective_step(step: _Step) -> _Step:
    """Make a method of a Collective one that all processes take together; its arguments are passed by position."""

    @wraps(step)
    def take(self: Collective, /, *arguments: Any) -> Any:
        return self.announce(step, self, arguments) if self.announce else step(self, *arguments)

    take.is_step = True  # type: ignore[attr-defined]
    return cast(_Step, take)
