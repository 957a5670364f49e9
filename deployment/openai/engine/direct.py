"""Ask the drop-in engine of the same host through its sockets, past gRPC and Triton; see backends' ``direct``."""

from __future__ import annotations

import asyncio
import glob
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from deployment.openai.engine.exchange import DirectError, Exchange, lost, not_failed
from deployment.openai.engine.outputs import Array, Reader
from ft_format.socket_messages import (
    HANDSHAKE,
    AdapterWish,
    Asked,
    Frame,
    Frames,
    Kind,
    MessageError,
    Scalar,
    frame,
    socket_name,
    unpack,
)

_TOKENS = ("output_ids", "sequence_length")
"""The outputs of a request that wants its tokens and nothing more."""
_PATIENCE_S = 5.0
_PAUSE_S = 1.0
"""Until a model's sockets are looked for again, if there was none."""


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
        found = await self.connections(model)
        return found[next(self._turns) % len(found)] if found else None

    async def connections(self, model: str) -> list[Connection]:
        """Return connections to all instances of a model."""
        if self._directory is None:
            return []
        if not self._is_known(model):
            async with self._lock:
                if not self._is_known(model):
                    await self._look(model)
        return [each for each in self._models[model].connections if each.is_open]

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
        self._exchanges: dict[int, Exchange] = {}
        self._wishes: dict[int, asyncio.Future[Frame]] = {}
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
            raise lost()
        number, exchange = next(self._numbers), Exchange(reader)
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

    async def change_adapters(self, wish: AdapterWish) -> Mapping[str, Any]:
        """Change the engine's adapters; returns those that it has then; DirectError: it refused, or is gone."""
        if not self.is_open:
            raise lost()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._wishes[number] = answer
        self._send(frame(Kind.ADAPTERS, number, wish.pack()))
        try:
            fields, _ = unpack(not_failed(await answer).body)
        finally:
            del self._wishes[number]
        adapters: Mapping[str, Any] = fields["adapters"]
        return adapters

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
                elif (answer := self._wishes.get(each.number)) is not None and not answer.done():
                    answer.set_result(each)
        except MessageError:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail all requests; called by the event loop."""
        self.is_open = False
        if not self._agreed.done():
            self._agreed.set_exception(lost())
        for exchange in self._exchanges.values():
            exchange.lose()
        for answer in self._wishes.values():
            if not answer.done():
                answer.set_exception(lost())
