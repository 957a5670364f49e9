"""A probe of a server that starts, in a thread of its own, so that the server is watched meanwhile."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod

from handover.errors import ServerError


class BackgroundProbe(ABC):
    """One generation of one token, tried in the background until the server takes requests.

    Args:
        timeout_s: seconds for everything together.
    """

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._finished = threading.Event()
        self._error: ServerError | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def is_done(self) -> bool:
        """Whether the generation came back.

        Raises:
            ServerError: it failed, or what came back is no generation.
        """
        if not self._finished.is_set():
            return False
        if self._error:
            raise self._error
        return True

    @abstractmethod
    def _probe(self) -> None:
        """Wait until the server listens, and generate; ServerError: it failed."""

    def _run(self) -> None:
        try:
            self._probe()
        except ServerError as error:
            self._error = error
        self._finished.set()
