"""Connections between rank 0 and every other rank: how they find each other, talk, and notice a loss.

Rank 0 writes its address into a file, for which the others wait (see door.py). Each has two lines to rank 0. One is for
words: what rank 0 announces comes sooner so than by a broadcast of gloo's. On the other both ends give a sign of life
every second. A rank that gives none any more, or hangs up, is lost, however it ended and whatever its neighbours wait
for. A network with a rank lost is of no use, so every process that notices ends. More lines lead to rank 0's store
where there are several hosts (see gate.py).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..errors import EngineError
from .door import SIGN, Door, call, read, read_number, write
from .rank import Ranks
from .store import Gate, lead_to

_log = logging.getLogger(__name__)
_WORDS, _LIFE, _STORE = 0, 1, 2
_FAREWELL = b"!"
_SIGN_S, _POLL_S, _GATHER_POLL_S = 1.0, 0.2, 0.05
_GRACE_S = 5.0  # for an error that says more, and the answers to requests that have failed


class ControlChannel:
    """Of one process.

    Args:
        ranks: of this process.
        greeting: what rank 0 tells everybody who comes.
        check: raises an EngineError where it is of no use to wait for the others any more.
        store_port: of rank 0's store, on its loopback.

    Attributes:
        greeting: rank 0's.
        lost: what has happened, once a rank is lost.
        at_loss: are called then, from any thread.
        is_fatal: whether this process ends then, in a moment.

    Raises:
        EngineError: not every rank has come in time.
    """

    def __init__(
        self,
        ranks: Ranks,
        greeting: bytes = b"",
        check: Callable[[], None] = lambda: None,
        store_port: int = 0,
    ) -> None:
        self._ranks, self.greeting, self.lost, self._store_port = ranks, greeting, "", store_port
        self.at_loss: list[Callable[[], object]] = []
        self.is_fatal = True
        self._lines: dict[tuple[int, int], socket.socket] = {}  # by what it is for, and whose the other end is
        self._entrance: Door | Gate | None = None
        self._is_lost, self._is_over, self._is_closed = (threading.Event() for _ in range(3))
        self._have_all_come = False
        threading.Thread(target=self._give_signs, name="signs of life", daemon=True).start()
        try:
            (self._find if ranks.rank else self._gather)(check)
        except BaseException:
            self.close()
            raise

    def _gather(self, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._ranks.timeout_s
        door = self._entrance = Door(self._ranks, self.greeting, self._let_in)
        while len(self._lines) < 2 * (self._ranks.world_size - 1):
            check()
            if self.lost or time.monotonic() > deadline:
                raise EngineError(self.lost or f"rank 0: not all have come within {self._ranks.timeout_s:g} s")
            time.sleep(_GATHER_POLL_S)
        self._have_all_come = True
        if self._ranks.is_one_host:  # who reaches rank 0's loopback needs no door to its store
            door.close()

    def _let_in(self, kind: int, rank: int, line: socket.socket) -> None:
        if kind == _STORE:
            lead_to(self._store_port, line)
        elif self._have_all_come or self._is_closed.is_set() or not 0 < rank < self._ranks.world_size:
            line.close()
        else:
            self._open(line, kind, rank)

    def _find(self, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._ranks.timeout_s
        while time.monotonic() < deadline:
            check()
            # No file, an unfinished one, or one of an earlier start, with a port that nobody listens at any more.
            with suppress(OSError, ValueError, KeyError, TypeError):
                address = json.loads(Path(self._ranks.rendezvous).read_text())
                if address["run"] == self._ranks.run:
                    lines = [call(address, self._ranks.rank, kind) for kind in (_WORDS, _LIFE)]
                    for kind, (line, self.greeting) in enumerate(lines):
                        self._open(line, kind, 0)
                    if not self._ranks.is_one_host:
                        self._entrance = Gate(partial(call, address, self._ranks.rank, _STORE))
                    return
            time.sleep(_POLL_S)
        rank, timeout_s, file = self._ranks.rank, self._ranks.timeout_s, self._ranks.rendezvous
        raise EngineError(f"rank {rank}: rank 0 has not come within {timeout_s:g} s ({file})")

    @property
    def gate_port(self) -> int | None:
        """Port of this host's loopback that leads to rank 0's store; None where all share one loopback."""
        return self._entrance.port if isinstance(self._entrance, Gate) else None

    def _open(self, line: socket.socket, kind: int, rank: int) -> None:
        line.settimeout(self._ranks.silence_s if kind == _LIFE else None)  # nobody may ask anything for days
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines[kind, rank] = line  # in place of one that somebody has given up who calls again
        if kind == _LIFE:
            threading.Thread(target=self._watch, args=(line, rank), name="watch", daemon=True).start()

    def _of(self, kind: int) -> list[socket.socket]:
        return [line for (of, _), line in list(self._lines.items()) if of == kind]

    def _give_signs(self) -> None:
        while not self._is_over.wait(_SIGN_S):
            for line in self._of(_LIFE):
                with suppress(OSError):  # whoever watches it says so
                    line.sendall(SIGN)

    def _watch(self, line: socket.socket, rank: int) -> None:
        problem = "it has hung up"
        try:
            while signs := line.recv(1 << 10):
                if _FAREWELL in signs:
                    self._is_over.set()
                    return
        except OSError as error:
            is_silent = isinstance(error, TimeoutError)
            problem = f"no sign of life for {self._ranks.silence_s:g} s" if is_silent else str(error)
        self.give_up(f"rank {rank} is lost: {problem}")

    def give_up(self, problem: str) -> None:
        """Say what has happened, and end this process in a moment if that is fatal."""
        if self._is_over.is_set():
            return
        self._is_over.set()  # the first word is the right one
        sys.stderr.write(f"fastertransformer: rank {self._ranks.rank} of {self._ranks.world_size}: {problem}\n")
        sys.stderr.flush()
        self.lost = problem
        self._is_lost.set()
        if self.is_fatal:
            threading.Thread(target=self._end_process, daemon=True).start()
        for act in self.at_loss:
            try:
                act()
            except Exception:  # the others are to be called all the same
                _log.exception("what is to be done at a loss failed")

    def _end_process(self) -> None:
        if not self._is_closed.wait(_GRACE_S):
            os._exit(1)

    def learn_of_loss(self, timeout_s: float = 2.0) -> str:
        """Wait for word of who was lost, for more than it takes to see that a process has ended."""
        self._is_lost.wait(timeout_s)
        return self.lost

    def send(self, message: bytes) -> None:
        """Send a message to rank 0, or from rank 0 to all others.

        Raises:
            OSError: one of them is gone.
        """
        for line in self._of(_WORDS):
            write(line, message)

    def receive(self, timeout_s: float | None = None) -> list[bytes]:
        """Wait for the next message of rank 0, which is empty where none follows, or of each of the others.

        Raises:
            OSError: one of them is gone, or has said nothing in time.
        """
        messages = []
        for line in self._of(_WORDS):
            line.settimeout(timeout_s)
            messages.append(read(line, read_number(line)))
            line.settimeout(None)
        return messages

    def say_farewell(self) -> None:
        """Let nobody take the end of this process for a loss, nor this one that of another: no message follows."""
        self._is_over.set()
        with suppress(OSError):
            for line in self._of(_LIFE):
                line.sendall(_FAREWELL)
            self.send(b"")

    def close(self) -> None:
        """Hang up."""
        self._is_over.set()
        self._is_closed.set()
        if self._entrance:
            self._entrance.close()
        for line in list(self._lines.values()):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
