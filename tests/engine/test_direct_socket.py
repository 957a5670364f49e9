"""The engine asked through its socket by the endpoint's own client; the engine in process says what is right."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shards.gpt2_checkpoint import random_gpt2, write_shards

from backends.fastertransformer.direct.reply import DirectReply
from backends.fastertransformer.direct.server import DirectServer
from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.rows.answer import Answer, Failure, Tokens
from backends.fastertransformer.engine.settings import Settings
from deployment.openai.engine.direct import Connection, Direct
from deployment.openai.engine.exchange import ClosingError, DirectError
from deployment.openai.engine.outputs import Outputs
from ft_format.socket_messages import HANDSHAKE, LOAD, UNLOAD, AdapterWish, Asked, Kind, frame, pack, socket_name

IDS, COUNT = [5, 6, 7, 8], 12
TOKENS = ("output_ids", "sequence_length")
SCORES = (*TOKENS, "output_raw_log_probs", "output_top_log_probs", "output_top_ids")
MODEL = "fastertransformer"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    checkpoint = write_shards(random_gpt2(n_positions=1024), tmp_path_factory.mktemp("direct"), 1)
    opened = open_engine(Settings(checkpoint, 1, 1, "fp32"))
    yield opened
    opened.close()


ASKED: dict[str, Any] = {"name": "", "outputs": list(TOKENS), "shown": 4, "is_streamed": True, "arrived_ns": 1}
WRONG: list[dict[str, Any]] = [{"name": 5}, {"name": None}, {"outputs": 5}, {"outputs": [[]]}, {"shown": "4"}]
WRONG += [{"is_streamed": []}, {"arrived_ns": "now"}, {"arrived_ns": None}]


class Served:
    """A server on a socket in a directory, and how its requests have ended."""

    def __init__(self, engine: Engine, directory: Path, version: str = "1", limit_s: float = 60) -> None:
        self.engine, self.ends = engine, list[Answer]()
        self.path = directory / socket_name(MODEL, version, "0")
        ways = engine.announce, self._take, self._change, lambda _, content: self.ends.append(content)
        self.server = DirectServer(self.path, *ways, limit_s)

    def _take(self, tensors: dict[str, Any], reply: DirectReply) -> None:
        def answer(given: Answer) -> None:
            reply.send(given)

        parsed = self.engine.parse(tensors)
        ways = reply.has_gone, None, None, reply.is_behind, reply.wants_tokens_alone(parsed)
        self.engine.submit(parsed, answer, reply.asked.is_streamed, *ways)

    def _change(self, wish: AdapterWish) -> Any:
        if wish.action == LOAD:
            self.engine.load_adapter(wish.name, Path(wish.path))
        elif wish.action == UNLOAD:
            self.engine.unload_adapter(wish.name)
        return self.engine.adapters()

    def close(self) -> None:
        self.server.refuse_more()
        self.server.close()


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")  # short: a socket's address has 107 bytes


@pytest.fixture
def served(engine: Engine, directory: Path) -> Iterator[Served]:
    running = Served(engine, directory)
    yield running
    running.close()


def tensors(count: int = COUNT, **more: Any) -> dict[str, Any]:
    given = {"input_ids": np.array([IDS], np.uint32), "input_lengths": np.array([[len(IDS)]], np.uint32)}
    return {**given, "request_output_len": np.array([[count]], np.uint32), **more}


TWICE = frame(Kind.REQUEST, 1, pack(ASKED, tensors(900))) * 2  # with one number


def expected(engine: Engine, **more: Any) -> dict[str, Any]:
    (answer,) = engine.generate([engine.parse(tensors(**more))])
    return answer


def run(directory: Path, use: Callable[[Direct], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        direct = Direct(directory)
        try:
            return await asyncio.wait_for(use(direct), 240)
        finally:
            direct.close()

    return asyncio.run(main())


async def opened(direct: Direct) -> Connection:
    connection = await direct.connection(MODEL)
    assert connection is not None
    return connection


class Collector:
    """Keeps the answers to one request; ``room`` is what its client lets it wait for, if it is behind."""

    def __init__(self, room: asyncio.Event | None = None, enough: int = 10_000) -> None:
        self.arrived: asyncio.Queue[Outputs | None] = asyncio.Queue()
        self.room, self.enough, self.was_ready = room, enough, False

    def get_ready(self) -> None:
        self.was_ready = True

    def take(self, answer: Outputs) -> bool:
        assert self.was_ready
        self.arrived.put_nowait(answer)
        return self.room is not None and not self.room.is_set()

    async def catch_up(self) -> None:
        assert self.room is not None
        await self.room.wait()

    @property
    def has_enough(self) -> bool:
        return self.arrived.qsize() >= self.enough


async def stream(
    connection: Connection,
    given: dict[str, Any],
    outputs: Sequence[str] = TOKENS,
    is_streamed: bool = True,
    shown: int = len(IDS),
) -> AsyncGenerator[Outputs, None]:
    """The answers one by one; the request is cancelled when its reader leaves."""
    reader = Collector()
    asked = asyncio.create_task(connection.ask(given, outputs, shown, is_streamed, "name", time.monotonic_ns(), reader))
    asked.add_done_callback(lambda _: reader.arrived.put_nowait(None))
    try:
        while (answer := await reader.arrived.get()) is not None:
            yield answer
        await asked
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def answers(direct: Direct, given: dict[str, Any], **more: Any) -> list[Outputs]:
    return [each async for each in stream(await opened(direct), given, **more)]


def tokens_of(given: Sequence[Outputs], start: int = len(IDS)) -> list[int]:
    found: list[int] = []
    for each in given:
        found += each.new_tokens(start + len(found), start + COUNT)
    return found


def behind(answer: dict[str, Any]) -> list[int]:
    return list(answer["output_ids"][0, 0, len(IDS) : int(answer["sequence_length"][0, 0])].tolist())


@pytest.mark.parametrize("is_streamed", [True, False])
def test_tokens_are_the_engines(engine: Engine, served: Served, directory: Path, is_streamed: bool) -> None:
    found = run(directory, lambda direct: answers(direct, tensors(), is_streamed=is_streamed))
    assert tokens_of(found) == behind(expected(engine))
    assert len(found) > 2 if is_streamed else len(found) == 1
    assert [type(each) for each in served.ends] == [Tokens]


def test_scores_are_the_engines(engine: Engine, served: Served, directory: Path) -> None:
    wanted = {"is_return_raw_log_probs": np.array([[True]]), "num_top_log_probs": np.array([[2]], np.uint32)}
    found = run(directory, lambda direct: answers(direct, tensors(**wanted), outputs=SCORES))
    answer = expected(engine, **wanted)
    assert tokens_of(found) == behind(answer)
    for name in SCORES:
        last = found[-1].read(name)
        assert last is not None and last.dtype == answer[name].dtype
        np.testing.assert_array_equal(last, answer[name])
    assert found[-1].read("cum_log_probs") is None  # it was not asked for


def test_many_at_once_get_their_own(engine: Engine, served: Served, directory: Path) -> None:
    prompts = [[3 + number, 9, 4 + number] for number in range(20)]

    def given(prompt: list[int]) -> dict[str, Any]:
        return tensors() | {"input_ids": np.array([prompt], np.uint32), "input_lengths": np.array([[3]], np.uint32)}

    async def one(connection: Connection, prompt: list[int]) -> list[int]:
        return tokens_of([each async for each in stream(connection, given(prompt), shown=len(prompt))], len(prompt))

    async def all_of_them(direct: Direct) -> list[list[int]]:
        connection = await opened(direct)
        return await asyncio.gather(*(one(connection, each) for each in prompts))

    for prompt, found in zip(prompts, run(directory, all_of_them), strict=True):
        (answer,) = engine.generate([engine.parse(given(prompt))])
        assert found == answer["output_ids"][0, 0, 3 : int(answer["sequence_length"][0, 0])].tolist()


def test_what_the_engine_refuses_is_told_in_its_words(engine: Engine, served: Served, directory: Path) -> None:
    async def both(direct: Direct) -> list[Outputs]:
        with pytest.raises(DirectError, match="unknown input 'temprature'.*did you mean 'temperature'") as error:
            await answers(direct, tensors(temprature=np.array([[1]], np.float32)))
        assert error.value.code == "INVALID_ARG"
        return await answers(direct, tensors())

    assert tokens_of(run(directory, both)) == behind(expected(engine))  # the connection goes on


def in_use(engine: Engine) -> bool:
    return bool(engine.metrics.running or engine.metrics.waiting)


def wait_until_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 240
    while in_use(engine):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_answers_wait_for_a_client_that_is_behind(engine: Engine, served: Served, directory: Path) -> None:
    async def fall_behind(direct: Direct) -> list[Outputs]:
        reader = Collector(asyncio.Event())
        asked = asyncio.create_task(
            (await opened(direct)).ask(tensors(), TOKENS, len(IDS), True, "name", time.monotonic_ns(), reader)
        )
        first = await reader.arrived.get()
        await asyncio.to_thread(wait_until_idle, engine)  # the others were made meanwhile
        assert reader.arrived.empty() and not asked.done()
        assert reader.room is not None
        reader.room.set()
        await asked
        found = [first, *(reader.arrived.get_nowait() for _ in range(reader.arrived.qsize()))]
        return [each for each in found if each is not None]

    found = run(directory, fall_behind)
    assert len(found) > 1 and tokens_of(found) == behind(expected(engine))


def test_what_a_reader_cannot_read_fails_and_ends_its_request(engine: Engine, served: Served, directory: Path) -> None:
    class Broken(Collector):
        def take(self, answer: Outputs) -> bool:
            raise ValueError("cannot be read")

    async def both(direct: Direct) -> list[Outputs]:
        connection = await opened(direct)
        with pytest.raises(ValueError, match="cannot be read"):
            await connection.ask(tensors(900), TOKENS, len(IDS), True, "name", time.monotonic_ns(), Broken())
        await asyncio.to_thread(wait_until_idle, engine)
        return [each async for each in stream(connection, tensors())]

    before = engine.metrics.finished["abort"]
    assert tokens_of(run(directory, both)) == behind(expected(engine))  # the connection goes on
    assert engine.metrics.finished["abort"] == before + 1


def test_a_reader_that_has_enough_ends_its_request(engine: Engine, served: Served, directory: Path) -> None:
    async def take_two(direct: Direct) -> int:
        reader = Collector(enough=2)
        connection = await opened(direct)
        await connection.ask(tensors(900), TOKENS, len(IDS), True, "name", time.monotonic_ns(), reader)
        await asyncio.to_thread(wait_until_idle, engine)
        return reader.arrived.qsize()

    before = engine.metrics.finished["abort"]
    assert run(directory, take_two) == 2
    assert engine.metrics.finished["abort"] == before + 1


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_request_whose_client_has_gone_ends(engine: Engine, served: Served, directory: Path, is_lost: bool) -> None:
    async def leave(direct: Direct) -> None:
        connection = await opened(direct)
        asked = stream(connection, tensors(900))
        await anext(asked)
        if is_lost:
            connection.close()
            with pytest.raises(DirectError, match="has gone"):
                while True:
                    await anext(asked)
        await asked.aclose()
        await asyncio.to_thread(wait_until_idle, engine)  # it had hundreds of tokens to go

    before = engine.metrics.finished["abort"]
    run(directory, leave)
    assert engine.metrics.finished["abort"] == before + 1
    assert [each.code for each in served.ends if isinstance(each, Failure)] == ["CANCELLED"]


def test_a_request_has_its_time_limit(engine: Engine, directory: Path) -> None:
    served = Served(engine, directory, limit_s=0.0)
    try:
        with pytest.raises(DirectError) as error:
            run(directory, lambda direct: answers(direct, tensors(900)))
        assert error.value.code == "CANCELLED"
    finally:
        served.close()


def test_a_client_that_does_not_read_delays_no_other(engine: Engine, served: Served, directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        deaf.connect(str(served.path))
        wanted = {"is_return_raw_log_probs": np.array([[True]]), "num_top_log_probs": np.array([[20]], np.uint32)}
        body = Asked("", SCORES, None, True, 0).pack(tensors(900, **wanted))
        for number in range(20):
            deaf.sendall(frame(Kind.REQUEST, number, body))
        found = run(directory, lambda direct: answers(direct, tensors()))
        assert tokens_of(found) == behind(expected(engine))
        wait_until_idle(engine)  # the engine does not wait for it either


def test_a_model_that_goes_answers_what_it_has_and_refuses_more(engine: Engine, directory: Path) -> None:
    served = Served(engine, directory)

    async def unload(direct: Direct) -> list[Outputs]:
        connection = await opened(direct)
        asked = stream(connection, tensors())
        found = [await anext(asked)]
        closing = asyncio.create_task(asyncio.to_thread(served.close))
        while not served.server.is_closing:
            await asyncio.sleep(0)
        with pytest.raises(ClosingError):
            await anext(stream(connection, tensors()))
        found += [each async for each in asked]
        await closing
        assert await direct.connection(MODEL) is None
        return found

    found = run(directory, unload)
    assert tokens_of(found) == behind(expected(engine))
    assert len(served.ends) == 1  # what was refused is asked again elsewhere, and is counted there


def test_the_newest_version_that_answers_is_asked(engine: Engine, directory: Path) -> None:
    async def follow(direct: Direct) -> None:
        assert await direct.connection(MODEL) is None
        second = Served(engine, directory, "2")
        one = await opened(direct)
        tenth = Served(engine, directory, "10")
        other = await opened(direct)
        assert other is not one and await opened(direct) is other
        await answers(direct, tensors())
        assert (len(second.ends), len(tenth.ends)) == (0, 1)
        await asyncio.to_thread(tenth.close)  # its socket's file stays
        while other.is_open:  # until the loop has read of it
            await asyncio.sleep(0.01)
        await answers(direct, tensors())
        assert len(second.ends) == 1
        again = Served(engine, directory, "2")  # reloaded: it takes the place of the one that is there
        await answers(direct, tensors())
        assert (len(second.ends), len(again.ends)) == (1, 1)
        for each in (second, again):
            await asyncio.to_thread(each.close)

    run(directory, follow)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "sent",
    [
        b"\xff" * 9,
        struct.pack("<IBI", 0, 99, 1),
        frame(Kind.REQUEST, 1, b"nonsense!"),
        frame(Kind.REQUEST, 1, pack({"name": "", "unknown": 1}, {})),
        frame(Kind.TOKENS, 1),
        *(frame(Kind.REQUEST, 1, pack({**ASKED, **wrong}, {})) for wrong in WRONG),
        TWICE,
        frame(Kind.REQUEST, 1, struct.pack("<I", 100_000) + b"[" * 100_000),
        frame(Kind.REQUEST, 1, struct.pack("<I", 2) + b"[]"),
    ],
)
def test_nonsense_ends_its_connection_alone(engine: Engine, served: Served, directory: Path, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.settimeout(10)
        other.connect(str(served.path))
        other.sendall(sent)
        received = b"".join(iter(lambda: other.recv(1 << 16), b""))
    assert received == HANDSHAKE if sent != TWICE else received.startswith(HANDSHAKE)  # the first one's failure follows
    assert tokens_of(run(directory, lambda direct: answers(direct, tensors()))) == behind(expected(engine))


def test_another_programs_socket_is_left_alone(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(directory / socket_name(MODEL, "1", "0")))
        other.listen()
        other.settimeout(10)

        async def connect(direct: Direct) -> Connection | None:
            asked = asyncio.create_task(direct.connection(MODEL))
            accepted, _ = await asyncio.to_thread(other.accept)
            with accepted:
                accepted.sendall(b"slipway direct 4\n")
                return await asked

        assert run(directory, connect) is None


def test_a_socket_that_cannot_be_made_is_an_error(engine: Engine, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with pytest.raises(OSError, match="too long"):
        Served(engine, deep)
    with pytest.raises(FileNotFoundError):
        Served(engine, Path("/nonexistent"))
    assert not any(stat.S_ISSOCK(os.lstat(each).st_mode) for each in deep.iterdir())
