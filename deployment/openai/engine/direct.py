"""Ask the drop-in engine of the same host through its sockets, past gRPC and Triton; see backends' ``direct``."""

from __future__ import annotations

import asyncio
import glob
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from pathlib import Path

from deployment.openai.engine.outputs import Array, ArrayOutputs, Outputs, Reader, TokenOutputs
from ft_format.socket_messages import (
    CLOSING,
    HANDSHAKE,
    Asked,
    Frame,
    Frames,
    Kind,
    MessageError,
    Scalar,
    frame,
    socket_name,
    unpack,
    unpack_tokens,
)

_TOKENS = ("output_ids", "sequence_length")
"""The outputs of a request that wants its tokens and nothing more."""
_GONE = "the engine's process has gone"
_PATIENCE_S = 5.0
_LAST = (Kind.LAST_TOKENS, Kind.LAST_ARRAYS, Kind.FAILURE)
_WHOLE = (Kind.ARRAYS, Kind.LAST_ARRAYS)
"""Answers that have all tokens so far."""
_MOST_WAITING = 8
"""Of them a slow client leaves waiting; the next one takes the place of all."""
_PAUSE_S = 1.0
"""Until a model's sockets are looked for again, if there was none."""


class DirectError(Exception):
    """The engine refused a request, failed on it, or is gone.

    Args:
        problem: in the engine's words.
        code: a name of pb_utils.TritonError.
    """

    def __init__(self, problem: str, code: str) -> None:
        super().__init__(problem)
        self.problem, self.code = problem, code


class ClosingError(DirectError):
    """The model is unloaded or its process has gone before any answer: the request can be sent another way."""


@dataclass
class _Model:
    """How a model is asked.

    Attributes:
        connections: to the instances of its newest version.
        stamp: of the directory when its sockets were looked for.
        looked_s: when that was, of time.monotonic.
    """

    connections: list[Connection]
    stamp: int
    looked_s: float


class Direct:
    """Connections to the sockets of a server's models; of one event loop.

    Args:
        directory: with the sockets; None: there are none.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._models: dict[str, _Model] = {}
        self._turns, self._lock = count(), asyncio.Lock()

    async def connection(self, model: str) -> Connection | None:
        """Return a connection to an instance of a model, each in its turn; None: it has no socket here."""
        if self._directory is None:
            return None
        if not self._is_known(model):
            async with self._lock:
                if not self._is_known(model):
                    await self._look(model)
        found = [each for each in self._models[model].connections if each.is_open]
        return found[next(self._turns) % len(found)] if found else None

    def _is_known(self, model: str) -> bool:
        """Whether nothing has come or gone since a model's sockets were looked for; if there was none, for a while."""
        known = self._models.get(model)
        if known is None or known.stamp != self._stamp():
            return False
        if known.connections:
            return any(each.is_open for each in known.connections)
        return time.monotonic() - known.looked_s < _PAUSE_S

    def _stamp(self) -> int:
        """When a socket was made last, in ns."""
        assert self._directory is not None
        try:
            return self._directory.stat().st_mtime_ns
        except OSError:
            return 0

    async def _look(self, model: str) -> None:
        stamp, looked_s, before = self._stamp(), time.monotonic(), self._models.get(model)
        self._models[model] = _Model(await self._connect(model), stamp, looked_s)
        for each in before.connections if before is not None else ():
            each.retire()

    async def _connect(self, model: str) -> list[Connection]:
        """Connect to all instances of the newest version, which is the one that Triton asks."""
        assert self._directory is not None
        by_version: dict[int, list[Path]] = {}
        for path in self._directory.glob(f"{glob.escape(model)}.*.sock"):
            _, version, instance, _ = path.name.rsplit(".", 3)
            if path.name == socket_name(model, version, instance) and version.isdecimal():
                by_version.setdefault(int(version), []).append(path)
        for number in sorted(by_version, reverse=True):
            tried = [await _try_to_connect(path) for path in sorted(by_version[number])]
            if found := [each for each in tried if each is not None]:
                return found
        return []

    def close(self) -> None:
        """Close all connections."""
        for model in self._models.values():
            for each in model.connections:
                each.close()


async def _try_to_connect(path: Path) -> Connection | None:
    """Connect to a socket; None: nothing listens there, as after an instance was unloaded, or no engine of ours."""
    connection = Connection()
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, str(path))
        await asyncio.wait_for(connection.agreed(), _PATIENCE_S)
    except (OSError, DirectError, asyncio.TimeoutError):
        connection.close()
        return None
    return connection


class Connection(asyncio.Protocol):
    """A connection to one instance of a model."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._handshake = b""
        self._agreed = asyncio.get_running_loop().create_future()
        self._frames = Frames()
        self._exchanges: dict[int, _Exchange] = {}
        self._numbers = count(1)
        self.is_open = self._is_retired = False

    async def agreed(self) -> None:
        """Wait for the engine's handshake; DirectError: it is another one, of another version."""
        await self._agreed

    async def ask(
        self,
        tensors: Mapping[str, Array | Scalar],
        outputs: Sequence[str],
        shown: int | None,
        is_streamed: bool,
        request_id: str,
        arrived_ns: int,
        reader: Reader,
    ) -> None:
        """Send one request and hand its answers over; the request is cancelled when this is, or the reader has enough.

        Args:
            tensors: inputs by name.
            outputs: names of what is to be answered.
            shown: tokens in front of those that are generated; None: they are not needed alone.
            is_streamed: whether each token is wanted when it is made.
            request_id: for the server's log.
            arrived_ns: of time.monotonic_ns, when the client's request was there.
            reader: of the answers.

        Raises:
            DirectError: the engine refused the request, failed on it, or is gone.
        """
        if not self.is_open:
            raise _lost()
        number, exchange = next(self._numbers), _Exchange(reader)
        start = shown if tuple(outputs) == _TOKENS else None
        asked = Asked(request_id, outputs, start, is_streamed, arrived_ns)
        self._exchanges[number] = exchange
        self._send(frame(Kind.REQUEST, number, asked.pack(tensors)))
        try:
            reader.get_ready()
            await exchange.wait()
        finally:
            del self._exchanges[number]
            if not exchange.is_complete and self.is_open:
                self._send(frame(Kind.CANCEL, number))
            if self._is_retired and not self._exchanges:
                self.close()

    def retire(self) -> None:
        """Close it when its requests are answered."""
        self._is_retired = True
        if not self._exchanges:
            self.close()

    def close(self) -> None:
        """Close it; its requests fail."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def _send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; called by the event loop."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass on what has come; called by the event loop."""
        if not self.is_open:
            self._handshake += data
            if len(self._handshake) < len(HANDSHAKE) and HANDSHAKE.startswith(self._handshake):
                return
            if not self._handshake.startswith(HANDSHAKE):
                self.close()
                return
            data, self.is_open = self._handshake[len(HANDSHAKE) :], True
            if not self._agreed.done():
                self._agreed.set_result(None)
        try:
            for each in self._frames.feed(data):
                if (exchange := self._exchanges.get(each.number)) is not None:
                    exchange.put(each)
        except MessageError:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail all requests; called by the event loop."""
        self.is_open = False
        if not self._agreed.done():
            self._agreed.set_exception(_lost())
        for exchange in self._exchanges.values():
            exchange.lose()


class _Wake(Enum):
    """Why who waits for the answers of a request is woken."""

    BEHIND = auto()  # the client is, and more answers wait
    OVER = auto()  # all answers are read, or one has failed


class _Exchange:
    """A request that was sent, and its answers.

    Args:
        reader: of the answers.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._waiting: deque[Frame] = deque()  # while the client is behind
        self._wake: asyncio.Future[_Wake] = asyncio.get_running_loop().create_future()
        self._has_begun = self._is_lost = False
        self._failure: Exception | None = None
        self.is_complete = False

    async def wait(self) -> None:
        """Wait until all answers are read, or the reader has enough; raises what has gone wrong."""
        while await self._wake is _Wake.BEHIND:
            await self._reader.catch_up()
            self._wake = asyncio.get_running_loop().create_future()
            self._read_on()
        if self._failure is not None:
            raise self._failure

    def put(self, given: Frame) -> None:
        """Take a message of the engine."""
        if given.kind in _WHOLE and len(self._waiting) >= _MOST_WAITING:
            self._waiting.clear()
        self._waiting.append(given)
        self._read_on()

    def lose(self) -> None:
        """Note that no more messages come: the engine has gone."""
        self._is_lost = True
        self._read_on()

    def _read_on(self) -> None:
        """Hand the reader what waits, as far as its client keeps up."""
        while self._waiting and not self._wake.done():
            given = self._waiting.popleft()
            self._has_begun, self.is_complete = True, given.kind in _LAST
            try:
                is_behind = self._reader.take(_read(given))
            except Exception as error:  # is raised where the request was sent
                self._failure, is_behind = error, False
            is_over = self.is_complete or self._failure is not None or self._reader.has_enough
            if is_over or is_behind:
                self._wake.set_result(_Wake.OVER if is_over else _Wake.BEHIND)
        if self._is_lost and not self._wake.done():
            self._failure = DirectError(_GONE, "UNAVAILABLE") if self._has_begun else _lost()
            self._wake.set_result(_Wake.OVER)


def _lost() -> ClosingError:
    return ClosingError(_GONE, "UNAVAILABLE")


def _read(given: Frame) -> Outputs:
    """Read an answer; DirectError: it says that the request failed."""
    if given.kind in (Kind.TOKENS, Kind.LAST_TOKENS):
        return TokenOutputs(unpack_tokens(given.body))
    fields, arrays = unpack(given.body)
    if given.kind == Kind.FAILURE:
        raise (ClosingError if fields["code"] == CLOSING else DirectError)(fields["problem"], fields["code"])
    return ArrayOutputs(arrays)
