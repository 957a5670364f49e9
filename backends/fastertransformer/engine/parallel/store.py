"""torch.distributed's store over several hosts: it listens on loopback alone, and is reached through rank 0's door.

torch's TCPStore asks nobody who he is, and whoever reaches it can read and set what the ranks agree on. So it is bound
to loopback. A rank of another host connects to a port on its own loopback, from where an authenticated line leads to
rank 0, and on to the store.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from .door import LOOPBACK

_PIECE_BYTES = 1 << 16


class Gate:
    """A port on loopback that leads to rank 0's store.

    Args:
        call: opens a line there; see ``door.call``.

    Attributes:
        port: to connect to.
    """

    def __init__(self, call: Callable[[], tuple[socket.socket, bytes]]) -> None:
        self._call = call
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, name="gate", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            try:
                connect(near, self._call()[0])
            except OSError:  # rank 0 is gone, which others notice
                near.close()

    def close(self) -> None:
        """Let nobody through any more; lines that are open stay so, until one of their ends hangs up."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def lead_to(port: int, line: socket.socket) -> None:
    """Connect a line with a port of this host's loopback."""
    connect(line, socket.create_connection((LOOPBACK, port)))


def connect(one: socket.socket, other: socket.socket) -> None:
    """Pass on what either end says to the other, in threads of their own."""
    for line in (one, other):
        line.settimeout(None)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for pair in ((one, other), (other, one)):
        threading.Thread(target=_pass_on, args=pair, name="store line", daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(_PIECE_BYTES):
            target.sendall(piece)
    for line in (source, target):  # both directions end together
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)
