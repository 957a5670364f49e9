"""What rank 0 tells the others goes over a connection to each: sooner there than by a broadcast of gloo's."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store  # torch.distributed.Store; mypy finds it here only

from .ranks import LOOPBACK, Ranks

_LENGTH_BYTES = 8
_SECRET_BYTES = 16
_KEY = "lines"


class Lines:
    """Connections between rank 0 and the others.

    Args:
        ranks: of this process.
        store: that all share.
        host: rank 0's.

    Raises:
        OSError: not every rank has come in time.
    """

    def __init__(self, ranks: Ranks, store: Store, host: str) -> None:
        self._lines: list[socket.socket] = []
        if ranks.rank == 0:
            self._accept(ranks, store)
        else:
            store.wait([_KEY], timedelta(seconds=ranks.timeout_s))
            port, secret = store.get(_KEY).decode().split()
            self._lines.append(socket.create_connection((host, int(port)), ranks.timeout_s))
            self._lines[0].sendall(bytes.fromhex(secret))
        for line in self._lines:
            line.settimeout(None)  # nobody may ask anything for days; that all live is Watch's matter
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _accept(self, ranks: Ranks, store: Store) -> None:
        secret = secrets.token_bytes(_SECRET_BYTES)
        with socket.create_server((LOOPBACK if ranks.local_size == ranks.world_size else "", 0)) as listener:
            listener.settimeout(ranks.timeout_s)
            store.set(_KEY, f"{listener.getsockname()[1]} {secret.hex()}")
            while len(self._lines) < ranks.world_size - 1:
                line, _ = listener.accept()
                line.settimeout(ranks.timeout_s)
                if _read(line, _SECRET_BYTES) == secret:
                    self._lines.append(line)
                else:
                    line.close()

    def send(self, message: bytes) -> None:
        """Send a message to all other ranks.

        Raises:
            OSError: one of them is gone.
        """
        for line in self._lines:
            line.sendall(len(message).to_bytes(_LENGTH_BYTES, "big") + message)

    def receive(self) -> bytes:
        """Wait for rank 0's next message.

        Raises:
            OSError: rank 0 is gone.
        """
        return _read(self._lines[0], int.from_bytes(_read(self._lines[0], _LENGTH_BYTES), "big"))

    def close(self) -> None:
        """Hang up."""
        for line in self._lines:
            with suppress(OSError):
                line.close()


def _read(line: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        if not (piece := line.recv(size - len(content))):
            raise ConnectionError("lost: the other end has hung up")
        content += piece
    return bytes(content)
