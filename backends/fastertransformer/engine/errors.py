"""What can go wrong, in words that a user can act on."""

from __future__ import annotations


class EngineError(Exception):
    """The engine cannot do what it was asked to do; the message says what, where and what is legal."""


class ConfigIniError(EngineError):
    """config.ini is missing, incomplete, or describes a network that this engine does not have."""


class WeightsError(EngineError):
    """Shards are missing or have the wrong size. Nothing is ever served in their place."""


class RequestError(EngineError):
    """A request is malformed or asks for something that is not honoured; the message names the tensor."""


class GroupLostError(EngineError):
    """Another process of the group is gone, or out of step: no further step can be taken."""
