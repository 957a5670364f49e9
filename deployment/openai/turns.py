"""Long work on the event loop, in short turns between which it does everything else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
_TURN_S = 0.003


class Turns:
    """Lets one of several long works go on at a time, so that many of them hold up others no longer than one."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, work: Generator[None, None, T]) -> T:
        """Run a generator, which yields wherever it may be interrupted; returns what it returns."""
        while True:
            async with self._lock:
                end = time.perf_counter() + _TURN_S
                try:
                    while time.perf_counter() < end:
                        next(work)
                except StopIteration as done:
                    result: T = done.value
                    return result
                await asyncio.sleep(0)
