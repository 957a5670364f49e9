"""Tunnels to torch.distributed's store from other hosts, through authenticated connections to rank 0.

torch's TCPStore does not authenticate: any process that reaches it can read and write what the ranks exchange. So it
listens on rank 0's loopback. A rank of another host connects to a port on its own loopback, which is forwarded through
an authenticated connection to rank 0, and there to the store.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from .handshake import LOOPBACK, shut_down, socket_of

_CHUNK_BYTES = 1 << 16


class StoreTunnel:
    """A port on loopback that leads to rank 0's store.

    Args:
        connect: opens a connection to rank 0 for this purpose; see ``handshake.connect``.
    """

    def __init__(self, connect: Callable[[], tuple[Connection, bytes]]) -> None:
        self._connect = connect
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, name="store tunnel", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            try:
                forward(near, self._connect()[0])
            except OSError:  # rank 0 is lost, which the control channel reports
                near.close()

    def close(self) -> None:
        """Accept no further connection; open ones last until one of their ends hangs up."""
        shut_down(self._listener)
        self._listener.close()


def forward_to(port: int, connection: Connection) -> None:
    """Forward a connection to a port of this host's loopback."""
    forward(socket.create_connection((LOOPBACK, port)), connection)


def forward(near: socket.socket, connection: Connection) -> None:
    """Copy between a socket and a connection in both directions, in threads of their own."""
    with connection:
        far = socket_of(connection)
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for pair in ((near, far), (far, near)):
        threading.Thread(target=_copy, args=pair, name="store tunnel", daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(_CHUNK_BYTES):
            target.sendall(chunk)
    for end in (source, target):  # both directions end together
        shut_down(end)
