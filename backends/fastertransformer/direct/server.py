"""The engine's side of the socket: takes requests of the OpenAI endpoint, and sends what becomes of them.

Each connection, one for each of the endpoint's processes, has a thread that waits for requests and one that writes, so
a process that does not read delays its own clients alone. The engine's thread reads the requests itself, between its
steps; see engine/scheduling/arrivals.py. Of answers it only leaves each with its request: the thread that writes takes
the newest of each, which has all tokens, and sends those of all requests together. So a token of one of many streams
costs a few microseconds of Python's lock, for which the engine's steps wait. Of few streams the engine's thread sends
an answer itself, as far as the socket takes it at once: to wake the other thread takes longer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ft_format.socket_messages import (
    CLOSING,
    HANDSHAKE,
    AdapterWish,
    Array,
    Asked,
    Frame,
    Frames,
    Kind,
    MessageError,
    unpack,
)

from ..engine.errors import EngineError
from ..engine.rows.answer import INVALID, Answer, Failure
from ..engine.scheduling.arrivals import Source
from .reply import Described, DirectReply

_log = logging.getLogger(__name__)
_READ_BYTES = 1 << 18
_LONGEST_PATH = 107  # bytes of a Unix socket's address on Linux
_POLL_S = 0.02
_FEW = 4  # requests of a connection, up to which the engine's thread sends their answers
_REFUSED = Failure("the model is being unloaded", CLOSING)


class DirectServer:
    """Listens on a model's socket.

    Args:
        path: of the socket; one that is there is replaced.
        announce: has the engine's thread pull what waits in a connection.
        take: passes a request's tensors on to the engine. It may raise an EngineError: the request is invalid.
        change_adapters: does what is wanted of the model's adapters, and describes those that there are then.
        note_end: is told how each request has ended: its reply, and the last answer.
        limit_s: a request has at most; see settings.request_timeout_s.

    Raises:
        OSError: the socket cannot be made there.
    """

    def __init__(
        self,
        path: Path,
        announce: Callable[[Source], None],
        take: Callable[[dict[str, Array], DirectReply], None],
        change_adapters: Callable[[AdapterWish], Mapping[str, Any]],
        note_end: Callable[[DirectReply, Answer], None],
        limit_s: float = math.inf,
    ) -> None:
        self.announce, self.take, self.note_end, self.limit_s = announce, take, note_end, limit_s
        self.change_adapters = change_adapters
        self.is_closing = False
        self._connections = set[_Connection]()
        self._listener = _listen(path)
        self._thread = threading.Thread(target=self._accept, name="direct", daemon=True)
        self._thread.start()

    def refuse_more(self) -> None:
        """Take no more connections and requests, and wait until those that were taken are answered."""
        self.is_closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()
        while any(each.is_busy for each in list(self._connections)):  # a copy: connections end meanwhile
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Close all connections, after ``refuse_more``."""
        for each in list(self._connections):
            each.close()

    def _accept(self) -> None:
        while not self.is_closing:
            try:
                accepted, _ = self._listener.accept()
                connection = _Connection(accepted, self)
                connection.start()
            except (
                OSError,
                RuntimeError,
            ):  # closed, or out of descriptors or threads: it asks through Triton meanwhile
                time.sleep(_POLL_S)
                continue
            self._connections.add(connection)

    def forget(self, connection: _Connection) -> None:
        """Drop a connection that has ended."""
        self._connections.discard(connection)


class _Connection:
    """One process of the endpoint."""

    def __init__(self, accepted: socket.socket, server: DirectServer) -> None:
        self._socket, self._server = accepted, server
        self._replies: dict[int, DirectReply] = {}
        self._ready: queue.SimpleQueue[DirectReply | None] = queue.SimpleQueue()  # None: look at what else there is
        self._sending = threading.Lock()  # held while answers are taken and sent: they stay in their order
        self._rest = HANDSHAKE  # bytes that the socket did not take at once; under the lock
        self._is_lost = self._has_ended = False  # whether sending has failed, and whether reading is over
        self._frames, self._unread = Frames(), deque[Frame]()
        self._pulled = threading.Semaphore(0)  # once for each time that all was pulled
        self._watcher = threading.Thread(target=self._watch, name="direct-watcher", daemon=True)
        self._writer = threading.Thread(target=self._write, name="direct-writer", daemon=True)

    def start(self) -> None:
        """Send the handshake, and take requests."""
        self._ready.put(None)
        self._writer.start()
        self._watcher.start()

    @property
    def is_busy(self) -> bool:
        """Whether a request is not answered yet."""
        return bool(self._replies)

    def announce(self, reply: DirectReply) -> None:
        """Send an answer, or let it be sent."""
        if len(self._replies) > _FEW or not self._sending.acquire(blocking=False):
            self._ready.put(reply)
            return
        try:
            if self._rest:
                self._ready.put(reply)
                return
            written = self._next(reply)
            self._rest = written[self._send_at_once(written) :]
            if self._rest or self._has_ended:  # the thread that writes may wait for this to end
                self._ready.put(None)
        finally:
            self._sending.release()

    def _send_at_once(self, data: bytes) -> int:
        """Send what the socket takes without a wait; returns how many bytes that were."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # the next pull sees it too
            return len(data)

    def close(self) -> None:
        """End both threads."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._has_ended = True
        self._pulled.release()  # the engine may be closed already
        self._watcher.join()
        self._end()
        self._writer.join()

    def _watch(self) -> None:
        """Announce what comes, and wait until it was pulled."""
        arrival = select.poll()
        arrival.register(self._socket, select.POLLIN)
        while not self._has_ended:
            arrival.poll()
            self._server.announce(self)
            self._pulled.acquire()

    def pull(self, until_s: float) -> bool:
        """Take the requests that have come; see Source."""
        try:
            while True:
                while self._unread:
                    self._obey(self._unread.popleft())
                    if time.monotonic() > until_s:
                        return False
                data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
                if not data:
                    self._end()
                    break
                self._unread.extend(self._frames.feed(data))
        except BlockingIOError:
            pass
        except (OSError, MessageError):
            self._end()
        except Exception:  # of this connection alone: the engine's thread goes on
            _log.exception("a connection of the OpenAI endpoint could not be read")
            self._end()
        self._pulled.release()
        return True

    def _end(self) -> None:
        """Read no more, and let the writer end."""
        for reply in list(self._replies.values()):
            reply.is_cancelled = True
        self._has_ended = True
        self._ready.put(None)

    def _obey(self, given: Frame) -> None:
        if given.kind == Kind.CANCEL:
            if (reply := self._replies.get(given.number)) is not None:
                reply.is_cancelled = True
            return
        if given.kind not in (Kind.REQUEST, Kind.ADAPTERS):
            raise MessageError(f"a frame of kind {given.kind}")
        fields, tensors = unpack(given.body)
        wish = AdapterWish.read(fields) if given.kind == Kind.ADAPTERS else None
        asked = Asked(wish.action, (), None, False, 0) if wish else Asked.read(fields)
        if given.number in self._replies:
            raise MessageError(f"a second request of number {given.number}")
        reply = DirectReply(self.announce, given.number, asked, time.monotonic() + self._server.limit_s)
        self._replies[given.number] = reply
        if self._server.is_closing:
            reply.send(_REFUSED)
            return
        if wish:  # steps go on while files are read
            threading.Thread(target=self._change, args=(wish, reply), name="adapters", daemon=True).start()
            return
        with _failing(reply):
            self._server.take(tensors, reply)

    def _change(self, wish: AdapterWish, reply: DirectReply) -> None:
        with _failing(reply):
            reply.send(Described(self._server.change_adapters(wish)))

    def _write(self) -> None:
        while not self._has_ended or self._replies:
            waiting = [self._ready.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(self._ready.get_nowait())
            with self._sending:
                frames = [self._next(each) for each in waiting if each is not None]
                self._send(b"".join((self._rest, *frames)))
                self._rest = b""
        self._socket.close()
        self._server.forget(self)

    def _next(self, reply: DirectReply) -> bytes:
        """Return the frame of a request's answer that waits; a request that is answered is forgotten."""
        answer = reply.take()
        try:
            written = reply.write(answer)
        except Exception as error:  # of this request alone
            answer = Failure(f"the answer cannot be written: {error!r}")
            reply.is_cancelled = True
            written = reply.write(answer)
        if answer.is_final:
            if answer is not _REFUSED and not isinstance(answer, Described):
                self._server.note_end(reply, answer)
            self._replies.pop(reply.number, None)
        return written

    def _send(self, data: bytes) -> None:
        """Send bytes unless the other side has gone, which the next pull sees too."""
        if not self._is_lost:
            try:
                self._socket.sendall(data)
            except OSError:
                self._is_lost = True


@contextlib.contextmanager
def _failing(reply: DirectReply) -> Iterator[None]:
    """Answer a request by the exception that it leads to."""
    try:
        yield
    except EngineError as error:
        reply.send(Failure(str(error), INVALID))
    except Exception as error:
        reply.send(Failure(f"the request could not be read: {error!r}"))


def _listen(path: Path) -> socket.socket:
    """Listen at a path in place of what was there, without a moment in which nothing is."""
    if len(os.fsencode(path)) > _LONGEST_PATH - len(".new"):
        raise OSError(f"{path} is too long for a socket's address")
    listener, new = socket.socket(socket.AF_UNIX), path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        listener.bind(os.fspath(new))
        listener.listen()
        new.replace(path)
    except OSError:
        listener.close()
        raise
    return listener
