"""Inference over FasterTransformer's shards: torch, numpy and the standard library only. Nothing here knows Triton.

From the ground up; none imports what comes later. ``cache``: keys and values. ``ops``: the operations that a network
computes with, in torch or by kernels of our own. ``parallel``: one network over several processes. ``model``: what
config.ini describes, its weights, and the network. ``request``: a client's tensors, checked; they become one
``SamplingParams`` for each row. ``grammar``: which tokens may follow. ``rows``: the rows of requests while they are
generated. ``steps``: what generation calls, one step at a time. ``sampling``: logits to tokens. ``scheduling``: the
batch and the loop over steps; ``sessions`` keeps conversations, ``outputs`` makes the answers. ``loading`` builds all
of it, and ``engine`` runs it in a thread.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine, open_engine
    from .errors import EngineError
    from .settings import Settings

__all__ = ["Engine", "EngineError", "Settings", "open_engine"]
_MODULES = {"Engine": "engine", "EngineError": "errors", "Settings": "settings", "open_engine": "engine"}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: the process that tries grammars has no use for torch."""
    if name not in _MODULES:
        raise AttributeError(name)
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
