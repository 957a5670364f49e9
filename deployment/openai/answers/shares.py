"""How many answers of one request are generated at a time, so that the first token of another does not wait for all."""

from __future__ import annotations

import asyncio

from deployment.openai.service import Service

_PART_LEFT = 8


class Share:
    """One request's part of the engine's rows: an equal one among the requests that are being answered.

    Alone it has all but an eighth, at least one, which is left to whoever comes next. After others were there it grows
    answer by answer.

    Args:
        service: that answers requests.
        rows: that the engine computes at a time.
    """

    def __init__(self, service: Service, rows: int) -> None:
        self._service, self._most = service, max(1, rows - max(1, rows // _PART_LEFT))
        self._limit, self._running, self._turn = self._fair(), 0, asyncio.Condition()

    def _fair(self) -> int:
        return max(1, self._most // max(1, self._service.active))

    async def __aenter__(self) -> None:
        """Wait for a place."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._running < self._limit)
            self._running += 1

    async def __aexit__(self, *_: object) -> None:
        """Free the place."""
        async with self._turn:
            self._running -= 1
            self._limit = min(self._limit + 1, self._fair())
            self._turn.notify(2)
