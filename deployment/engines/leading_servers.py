"""The first process's server where several serve together: it lives and ends with those of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deployment.engines.process import EngineServer
from deployment.engines.ray_nodes import RayNode
from deployment.ranks.gathered import Gathered
from handover.errors import ServerError
from handover.progress import say


class LeadingServer(EngineServer):
    """The first process's server, which lives and ends with those of the others."""

    def __init__(self, gathered: Gathered, *given: Any) -> None:
        self._gathered = gathered
        super().__init__(*given)

    def check(self) -> None:
        """Look once, at the others too; see ``Gathered.check``."""
        super().check()
        self._gathered.check()

    def stop(self, exit_timeout_s: float | None) -> int:
        """End it, then the others', without which it answers nothing; all at once where it is to end at once."""
        if exit_timeout_s is None:
            self._gathered.order_stop()
        try:
            return super().stop(exit_timeout_s)
        finally:
            self._gathered.order_stop()
            self._gathered.wait_until_stopped()


class RayHead(RayNode):
    """Ray of the first node, then that of the others, then the engine.

    Args:
        gathered: the other nodes.
        order_start: tells them to start theirs, which look for this one.
        start_engine: starts the engine's program on this node.
        given: see ``RayNode``.
    """

    def __init__(
        self,
        gathered: Gathered,
        order_start: Callable[[], None],
        start_engine: Callable[[], LeadingServer],
        *given: Any,
    ) -> None:
        self._gathered, self._order_start, self._start_engine = gathered, order_start, start_engine
        self._is_ordered = False
        self._engine: LeadingServer | None = None
        super().__init__(*given)

    def check(self) -> None:
        """Look once at all that runs, and start what has its turn."""
        super().check()
        if self._engine is not None:
            self._engine.check()
        elif self._is_ordered:
            self._gathered.check()
            if self._gathered.have_started():
                say("together   Ray runs on all nodes")
                self._engine = self._start_engine()
        elif self.has_started:
            self._is_ordered = True
            self._order_start()

    def stop(self, exit_timeout_s: float | None) -> int:
        """End the engine, then Ray everywhere; returns the engine's exit status."""
        try:
            return self._engine.stop(exit_timeout_s) if self._engine is not None else 0
        finally:
            self._gathered.order_stop()
            super().stop(None)
            self._gathered.wait_until_stopped()

    def explain(self, problem: str) -> ServerError:
        """Quote the engine, once it runs."""
        return self._engine.explain(problem) if self._engine is not None else super().explain(problem)

    def word_of_crash(self, status: int) -> str:
        """Return how the engine ended, whose status that is."""
        return self._engine.word_of_crash(status) if self._engine is not None else ""
