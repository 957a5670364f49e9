"""How ranks connect to rank 0, and no other process can.

Rank 0 listens on a free port and writes its address and a random key into a file that only its owner can read. Both
ends of a connection prove that they know the key, by the HMAC challenges of ``multiprocessing.connection``; the other
rank then sends its rank and the purpose of the connection. (``multiprocessing.connection.Listener`` accepts one
connection after another, without a time limit.) Here a handshake has three seconds, and several run at a time, so a
client that is slow or silent delays no rank.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from .rank import Ranks

LOOPBACK = "127.0.0.1"
_KEY_BYTES, _HELLO_BYTES = 16, 64
_HANDSHAKE_S = 3.0
_MOST_HANDSHAKES = 64  # at a time; a rank that is refused connects again
_BACKLOG = 128
_ACK = b"ok"


class HandshakeListener:
    """Accepts authenticated connections until it is closed.

    Args:
        ranks: of this process, rank 0.
        startup_message: is sent to every rank that connects.
        accept: is called with the purpose of a connection, the rank at its other end, and the connection, in the
            handshake's thread.
    """

    def __init__(self, ranks: Ranks, startup_message: bytes, accept: Callable[[int, int, Connection], None]) -> None:
        self._startup_message, self._accept = startup_message, accept
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._places = threading.Semaphore(_MOST_HANDSHAKES)
        self.host, interface = _addresses(ranks)
        self._listener = socket.create_server((interface, 0), backlog=_BACKLOG)
        self._write_address(ranks)
        threading.Thread(target=self._run, name="handshake listener", daemon=True).start()

    def _write_address(self, ranks: Ranks) -> None:
        address = {"host": self.host, "port": self._listener.getsockname()[1], "key": self._key.hex()}
        file = Path(ranks.rendezvous)
        draft = file.with_name(f"{file.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(json.dumps(address | {"run": ranks.run}))
        draft.replace(file)

    def _run(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # too many files are open, or the caller has hung up
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._shake_hands, args=(sock,), name="handshake", daemon=True).start()
            else:
                sock.close()

    def _shake_hands(self, sock: socket.socket) -> None:
        try:
            with _handshake(sock) as connection:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                purpose, rank = json.loads(connection.recv_bytes(_HELLO_BYTES))
                connection.send_bytes(self._startup_message)
                connection.recv_bytes(len(_ACK))  # a rank that has stopped waiting connects again
            self._accept(int(purpose), int(rank), connection)
        except OSError:  # this connection is no rank's
            pass
        finally:
            self._places.release()

    def close(self) -> None:
        """Accept no further connection."""
        shut_down(self._listener)  # wakes the thread that accepts
        self._listener.close()


def connect(address: dict[str, str], rank: int, purpose: int) -> tuple[Connection, bytes]:
    """Connect to rank 0, at the address in its file.

    Returns:
        The connection, and rank 0's startup message.

    Raises:
        OSError: rank 0 does not answer in time, or refuses the connection.
    """
    key = bytes.fromhex(address["key"])
    sock = socket.create_connection((address["host"], int(address["port"])), _HANDSHAKE_S)
    with _handshake(sock) as connection:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send_bytes(json.dumps([purpose, rank]).encode())
        startup_message = connection.recv_bytes()
        connection.send_bytes(_ACK)
    return connection, startup_message


@contextmanager
def _handshake(sock: socket.socket) -> Iterator[Connection]:
    """Give a connection over a socket for a handshake; if that fails or times out, hang up and raise an OSError."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(os.dup(sock.fileno()))
    deadline = threading.Timer(_HANDSHAKE_S, shut_down, (sock,))
    deadline.daemon = True
    deadline.start()
    try:
        yield connection
    except BaseException as error:
        connection.close()
        if isinstance(error, (EOFError, ValueError, TypeError, AuthenticationError)):
            raise ConnectionError("the other end has hung up, or is no rank of this run") from error
        raise
    finally:
        deadline.cancel()
        sock.close()


def socket_of(connection: Connection) -> socket.socket:
    """Give a socket of the same connection, which is closed separately."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def hang_up(connection: Connection) -> None:
    """Close both directions of a connection, which wakes a thread that reads from it."""
    with suppress(OSError), socket_of(connection) as own:
        shut_down(own)


def shut_down(end: socket.socket) -> None:
    """Close both directions of a socket; it may be closed already."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _addresses(ranks: Ranks) -> tuple[str, str]:
    """Give rank 0's address for other ranks, and the address to listen on: that of this host's name."""
    if ranks.is_one_host:
        return LOOPBACK, LOOPBACK
    name = socket.gethostname()
    with suppress(OSError, ValueError):
        address = socket.gethostbyname(name)
        if not ipaddress.ip_address(address).is_loopback:
            return address, address
    return name, ""  # this host resolves its own name to loopback, other hosts may resolve it to an interface
