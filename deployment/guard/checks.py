"""Where checks run: short ones at once, long ones where no other client waits for them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from deployment.guard.limits import RefusedError
from deployment.processes.linux import die_with_parent

SHORT_BYTES = 64 << 10
"""What describes a request is checked at once up to this size, in a few milliseconds at most."""

_MOST_WAITING = 16
_NICENESS = 10
R = TypeVar("R")


def _yield_to_others() -> None:
    """Lower the priority of this thread below what passes requests on."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _begin_process() -> None:
    die_with_parent()
    _yield_to_others()


class Checks:
    """A process that parses what is long, and threads that decompress, which Python does without its lock."""

    def __init__(self) -> None:
        self._parsing: Executor | None = None
        self._decompressing = ThreadPoolExecutor(2, initializer=_yield_to_others)
        self._waiting = 0

    async def parse(self, check: Callable[[], R]) -> R:
        """Run a check of something long in the other process, which is started by the first of them."""
        if self._parsing is None:
            started = multiprocessing.get_context("spawn")
            self._parsing = ProcessPoolExecutor(1, started, initializer=_begin_process)
        try:
            return await self._run(self._parsing, check)
        except BrokenProcessPool:
            self._parsing = None
            raise RefusedError("the request could not be checked", 503) from None

    async def decompress(self, check: Callable[[], R]) -> R:
        """Decompress in a thread."""
        return await self._run(self._decompressing, check)

    async def _run(self, where: Executor, check: Callable[[], R]) -> R:
        if self._waiting >= _MOST_WAITING:
            raise RefusedError("too many large or compressed requests are waiting; try again", 503)
        self._waiting += 1
        try:
            return await asyncio.wrap_future(where.submit(check))
        finally:
            self._waiting -= 1
