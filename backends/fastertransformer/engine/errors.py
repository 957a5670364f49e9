"""Errors of the engine."""

from __future__ import annotations


class EngineError(Exception):
    """The engine cannot do what was requested.

    Args:
        problem: what is wrong, where, and what is legal.
        hint: what to do next.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(f"{problem}; {hint}" if hint else problem)


class ConfigIniError(EngineError):
    """config.ini is missing, incomplete, or describes a network that this engine does not have."""


class ConfigJsonError(EngineError):
    """config.json is missing, incomplete, or describes a network that this engine does not have."""


class WeightsError(EngineError):
    """Shards or tensors are missing or have the wrong size."""


class RequestError(EngineError):
    """A request is malformed or not supported; the message names the tensor."""


class UnavailableError(EngineError):
    """The engine has too much to do for a request; the same one may succeed later."""


class GroupLostError(EngineError):
    """Another rank is lost or out of step, so the group can take no further step."""
