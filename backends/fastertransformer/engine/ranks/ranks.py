"""Who takes part where a network is spread over several processes, and how they find each other and notice a loss.

The process that starts the others says in the environment variable SLIPWAY_RANKS what each is. Rank 0 opens a store on
a free port and writes its address into a file that all can read; the others wait for that file. From then on every
rank counts up a number of its own in the store: a rank that no longer does is lost, however it ended and whatever its
neighbours wait for. A network with a rank lost is of no use, so every process that notices ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore  # torch.distributed.TCPStore; mypy finds it here only

from ..errors import EngineError

VARIABLE = "SLIPWAY_RANKS"
LOOPBACK = "127.0.0.1"
_POLL_S = 0.2
_CONNECT_S = 3.0
_BEAT_S = 1.0
_LAST_WORDS_S = 1.0  # for the answers to requests that have failed


@dataclass(frozen=True)
class Ranks:
    """One process among several.

    Attributes:
        rank, world_size: of all.
        local_rank, local_size: of those on this host.
        rendezvous: file on a filesystem that all share; rank 0 writes it.
        run: tells this start from earlier ones with the same file.
        timeout_s: seconds until all must have come.
        silence_s: seconds without a sign of life after which a rank is lost.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    rendezvous: str
    run: str
    timeout_s: float
    silence_s: float = 20.0


def read_ranks(environment: Mapping[str, str]) -> Ranks | None:
    """Read SLIPWAY_RANKS, a JSON object of Ranks' attributes; None where it is not set."""
    text = environment.get(VARIABLE)
    try:
        return Ranks(**json.loads(text)) if text else None
    except (ValueError, TypeError) as error:
        raise EngineError(f"{VARIABLE} = {text} is not what it must be: {error}") from error


def meet(ranks: Ranks) -> TCPStore:
    """Open the store (rank 0) or find it.

    Raises:
        EngineError: rank 0 has not come in time.
    """
    return _open_store(ranks) if ranks.rank == 0 else _find_store(ranks)


def _open_store(ranks: Ranks) -> TCPStore:
    is_one_host = ranks.local_size == ranks.world_size
    host = LOOPBACK if is_one_host else socket.gethostname()
    listener = socket.create_server((LOOPBACK if is_one_host else "", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        ranks.world_size,
        is_master=True,
        timeout=timedelta(seconds=ranks.timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    file = Path(ranks.rendezvous)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    draft.write_text(json.dumps({"host": host, "port": port, "run": ranks.run}))
    draft.replace(file)
    return store


def _find_store(ranks: Ranks) -> TCPStore:
    deadline = time.monotonic() + ranks.timeout_s
    while time.monotonic() < deadline:
        # No file, an unfinished one, or one of an earlier start, with a port that nobody listens at any more.
        with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
            address = json.loads(Path(ranks.rendezvous).read_text())
            if address["run"] == ranks.run:
                store = connect(address["host"], address["port"], _CONNECT_S)
                store.set_timeout(timedelta(seconds=ranks.timeout_s))
                return store
        time.sleep(_POLL_S)
    raise EngineError(f"rank {ranks.rank}: rank 0 has not come within {ranks.timeout_s:g} s ({ranks.rendezvous})")


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to a store."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


class Watch:
    """Ends this process when another rank is lost. Rank 0 watches all; the others watch rank 0, which ends with them.

    Args:
        ranks: of this process.
        store: its address is used for a connection of our own.

    Attributes:
        on_loss: is called, from any thread, in place of ending this process; None: nobody can do better.
    """

    on_loss: Callable[[str], None] | None = None

    def __init__(self, ranks: Ranks, store: TCPStore) -> None:
        self._ranks = ranks
        self._store = connect(store.host, store.port, ranks.silence_s)
        others = range(1, ranks.world_size) if ranks.rank == 0 else range(1)
        self._counts = dict.fromkeys(others, -1)
        self._heard = dict.fromkeys(others, time.monotonic())
        self._is_over = threading.Event()
        # Two threads: with a rank 0 that hangs, or whose host is gone, the store does not answer.
        for work in (self._beat, self._judge):
            threading.Thread(target=work, name="watch", daemon=True).start()

    def end(self) -> None:
        """Stop watching."""
        self._is_over.set()

    def give_up(self, problem: str) -> None:
        """Say what has happened, and end this process in a moment, or see on_loss."""
        if self._is_over.is_set():
            return
        self._is_over.set()  # the first word is the right one
        sys.stderr.write(f"fastertransformer: rank {self._ranks.rank} of {self._ranks.world_size}: {problem}\n")
        sys.stderr.flush()
        if self.on_loss:
            self.on_loss(problem)
            return
        timer = threading.Timer(_LAST_WORDS_S, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT_S):
            try:
                self._store.add(_key(self._ranks.rank), 1)
                for rank, known in self._counts.items():
                    self._counts[rank] = self._store.add(_key(rank), 0)
                    if self._counts[rank] != known:
                        self._heard[rank] = time.monotonic()
            except RuntimeError as error:
                self.give_up(f"rank 0 is lost: {first_line(error)}")

    def _judge(self) -> None:
        while not self._is_over.wait(_BEAT_S):
            for rank, heard in self._heard.items():
                if time.monotonic() - heard > self._ranks.silence_s:
                    self.give_up(f"rank {rank} is lost: no sign of life for {self._ranks.silence_s:g} s")


def _key(rank: int) -> str:
    return f"alive/{rank}"


def first_line(error: Exception) -> str:
    """Leave out the stack that torch appends to its messages."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
