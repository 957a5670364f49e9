"""Authenticated connections to rank 0, and a tunnel through them for torch.distributed's store.

Rank 0 listens on a free port and writes its address and a random key into a file that only its owner can read. Both
ends of a connection prove that they know the key, by the HMAC challenges of ``multiprocessing.connection``; the other
rank then sends its rank and the purpose of the connection. (``multiprocessing.connection.Listener`` accepts one
connection after another, without a time limit.) Here a handshake has three seconds, and several run at a time, so a
client that is slow or silent delays no rank.

torch's TCPStore does not authenticate: any process that reaches it can read and write what the ranks exchange. So it
listens on rank 0's loopback, and a rank of another host reaches it through a port of its own loopback, whose
connections are forwarded to rank 0.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from .rank import Ranks

LOOPBACK = "127.0.0.1"
_HELLO_BYTES = 64
_HANDSHAKE_S = 3.0
_MOST_HANDSHAKES = 64  # at a time; a rank that is refused connects again
_BACKLOG = 128
_CHUNK_BYTES = 1 << 16
_ACK = b"ok"


class Listener:
    """Passes every connection to a port to ``handle``, which closes it or raises an OSError, in a thread of its own."""

    def __init__(self, interface: str, handle: Callable[[socket.socket], None]) -> None:
        self._handle, self._places = handle, threading.Semaphore(_MOST_HANDSHAKES)
        self._socket = socket.create_server((interface, 0), backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._run, name="handshake listener", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                sock = self._socket.accept()[0]
            except OSError:
                if self._socket.fileno() < 0:
                    return
                time.sleep(0.1)  # too many files are open, or the caller has hung up
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._handle_one, args=(sock,), name="handshake", daemon=True).start()
            else:
                sock.close()

    def _handle_one(self, sock: socket.socket) -> None:
        try:
            self._handle(sock)
        except OSError:  # this connection is no rank's, or rank 0 is lost, which the control channel reports
            sock.close()
        finally:
            self._places.release()

    def close(self) -> None:
        """Accept no further connection; open ones last until one of their ends hangs up."""
        _shut_down(self._socket)  # wakes the thread that accepts
        self._socket.close()


def publish_address(ranks: Ranks, host: str, port: int, key: bytes) -> None:
    """Write rank 0's address into the file for which the other ranks wait."""
    descriptor, draft = tempfile.mkstemp(dir=Path(ranks.rendezvous).parent)  # its owner alone may read it
    with open(descriptor, "w") as stream:
        json.dump({"host": host, "port": port, "key": key.hex(), "run": ranks.run}, stream)
    os.replace(draft, ranks.rendezvous)


def own_addresses(ranks: Ranks) -> tuple[str, str]:
    """Return rank 0's address for other ranks, and the address to listen on: that of this host's name."""
    if ranks.is_one_host:
        return LOOPBACK, LOOPBACK
    name = socket.gethostname()
    with suppress(OSError, ValueError):
        address = socket.gethostbyname(name)
        if not ipaddress.ip_address(address).is_loopback:
            return address, address
    return name, ""  # this host resolves its own name to loopback, other hosts may resolve it to an interface


def welcome(sock: socket.socket, key: bytes, startup_message: bytes) -> tuple[int, int, Connection]:
    """Accept another process's connection; returns its purpose, the rank at its other end, and the connection.

    Raises:
        OSError: the process is no rank, or too slow.
    """
    with _handshake(sock) as connection:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        purpose, rank = map(int, json.loads(connection.recv_bytes(_HELLO_BYTES)))
        connection.send_bytes(startup_message)
        connection.recv_bytes(len(_ACK))  # a rank that has stopped waiting connects again
    return purpose, rank, connection


def connect(address: dict[str, str], rank: int, purpose: int) -> tuple[Connection, bytes]:
    """Connect to rank 0, at the address in its file; returns the connection, and rank 0's startup message.

    Raises:
        OSError: rank 0 does not answer in time, or refuses the connection.
    """
    key = bytes.fromhex(address["key"])
    with _handshake(socket.create_connection((address["host"], int(address["port"])), _HANDSHAKE_S)) as connection:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send_bytes(json.dumps([purpose, rank]).encode())
        startup_message = connection.recv_bytes()
        connection.send_bytes(_ACK)
    return connection, startup_message


@contextmanager
def _handshake(sock: socket.socket) -> Iterator[Connection]:
    """Make a socket a connection for a handshake; if that fails or times out, hang up and raise an OSError."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(sock.detach())
    deadline = threading.Timer(_HANDSHAKE_S, hang_up, (connection,))
    deadline.daemon = True
    deadline.start()
    try:
        yield connection
    except (OSError, EOFError, ValueError, TypeError, AuthenticationError) as error:
        deadline.cancel()
        connection.close()
        raise ConnectionError("the other end has hung up, or is no rank of this run") from error
    finally:
        deadline.cancel()


def forward(near: socket.socket, connection: Connection) -> None:
    """Copy between a socket and a connection in both directions, in threads of their own."""
    with connection:
        far = _socket_of(connection)
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for pair in ((near, far), (far, near)):
        threading.Thread(target=_copy, args=pair, name="store tunnel", daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(_CHUNK_BYTES):
            target.sendall(chunk)
    for end in (source, target):  # both directions end together
        _shut_down(end)


def hang_up(connection: Connection) -> None:
    """Close both directions of a connection, which wakes a thread that reads from it."""
    with suppress(OSError), _socket_of(connection) as own:
        _shut_down(own)


def _socket_of(connection: Connection) -> socket.socket:
    """Return a socket of the same connection, which is closed separately."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def _shut_down(end: socket.socket) -> None:
    with suppress(OSError):  # it may be closed already
        end.shutdown(socket.SHUT_RDWR)
