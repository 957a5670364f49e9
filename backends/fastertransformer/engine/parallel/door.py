"""Where rank 0 lets the other ranks in, and nobody else.

Rank 0 listens on a free port and writes its address and a secret into a file that its owner alone can read. Whoever
connects must say the secret, what the line is for and which rank it is, all within three seconds; several are greeted
at once, so that a stranger who is slow, or says nothing, keeps nobody waiting.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .rank import Ranks

LOOPBACK = "127.0.0.1"
SIGN = b"."
_SECRET_BYTES, NUMBER_BYTES = 16, 8
_GREETING_S = 3.0  # all of it
_MOST_GREETED = 64  # at a time; a rank that finds the door shut calls again
_BACKLOG = 128


class Door:
    """Lets ranks in until it is closed.

    Args:
        ranks: of this process, rank 0.
        greeting: what rank 0 tells everybody who comes.
        let_in: is given what a line is for, whose the other end is, and the line; by a thread of each greeting.
    """

    def __init__(self, ranks: Ranks, greeting: bytes, let_in: Callable[[int, int, socket.socket], None]) -> None:
        self._greeting, self._let_in = greeting, let_in
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._places = threading.Semaphore(_MOST_GREETED)
        self.host, interface = _addresses(ranks)
        self._listener = socket.create_server((interface, 0), backlog=_BACKLOG)
        self._write_address(ranks)
        threading.Thread(target=self._run, name="door", daemon=True).start()

    def _write_address(self, ranks: Ranks) -> None:
        address = {"host": self.host, "port": self._listener.getsockname()[1], "secret": self._secret.hex()}
        file = Path(ranks.rendezvous)
        draft = file.with_name(f"{file.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(json.dumps(address | {"run": ranks.run}))
        draft.replace(file)

    def _run(self) -> None:
        while True:
            try:
                line = self._listener.accept()[0]
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # too many files are open, or who called has gone
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(line,), name="greeting", daemon=True).start()
            else:
                line.close()

    def _greet(self, line: socket.socket) -> None:
        deadline = time.monotonic() + _GREETING_S
        try:
            said = read(line, _SECRET_BYTES, deadline)
            kind, rank = read_number(line, deadline), read_number(line, deadline)
            if not hmac.compare_digest(said, self._secret):
                raise ConnectionError("a stranger")
            write(line, self._greeting)
            read(line, len(SIGN), deadline)  # whoever has not waited for the greeting calls again
            self._let_in(kind, rank, line)
        except OSError:  # losing this line is no loss
            line.close()
        finally:
            self._places.release()

    def close(self) -> None:
        """Let nobody in any more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits
        self._listener.close()


def call(address: dict[str, str], rank: int, kind: int) -> tuple[socket.socket, bytes]:
    """Call rank 0, as the address in its file says.

    Returns:
        The line, and rank 0's greeting.

    Raises:
        OSError: it does not answer, or lets nobody in.
    """
    deadline = time.monotonic() + _GREETING_S
    line = socket.create_connection((address["host"], int(address["port"])), _GREETING_S)
    try:
        numbers = (number.to_bytes(NUMBER_BYTES, "big") for number in (kind, rank))
        line.sendall(b"".join((bytes.fromhex(address["secret"]), *numbers)))
        greeting = read(line, read_number(line, deadline), deadline)
        line.sendall(SIGN)
    except BaseException:
        line.close()
        raise
    return line, greeting


def _addresses(ranks: Ranks) -> tuple[str, str]:
    """Where others find rank 0, and the address to listen on: of the interface that this host's name stands for."""
    if ranks.is_one_host:
        return LOOPBACK, LOOPBACK
    name = socket.gethostname()
    with suppress(OSError, ValueError):
        address = socket.gethostbyname(name)
        if not ipaddress.ip_address(address).is_loopback:
            return address, address
    return name, ""  # a host that takes its own name for loopback's: others know better which interface that is


def write(line: socket.socket, message: bytes) -> None:
    """Send a message."""
    line.sendall(len(message).to_bytes(NUMBER_BYTES, "big") + message)


def read_number(line: socket.socket, deadline: float | None = None) -> int:
    """Read a number; see ``read``."""
    return int.from_bytes(read(line, NUMBER_BYTES, deadline), "big")


def read(line: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Read so many bytes.

    Args:
        line: to read from.
        size: bytes.
        deadline: until which all of them must have come; None: the line's own time-out is each piece's.

    Raises:
        OSError: the other end has hung up, or is late.
    """
    content = bytearray()
    while len(content) < size:
        if deadline is not None:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError("late")
            line.settimeout(left_s)
        if not (piece := line.recv(size - len(content))):
            raise ConnectionError("lost: the other end has hung up")
        content += piece
    return bytes(content)
