"""Keys, logs, hang-ups and the end of the endpoint, in front of a fake server that makes a token every few moments."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest
from aiohttp import web
from support.servers.fake_triton import FakeTriton, count_up
from support.servers.openai_endpoint import OpenAIEndpoint, application_of, openai_endpoint
from support.servers.served import wait_for
from tritonclient.grpc import service_pb2 as pb

from deployment.openai.answers.shares import Share
from deployment.openai.engine.streams import Streams
from deployment.openai.listening.access import read_keys
from deployment.openai.listening.connections import Connections
from deployment.processes.linux import list_processes, look_up
from evaluation.speed.prompts.workload import LoadPrompt
from evaluation.speed.tables.record import RequestRecord
from evaluation.speed.transport.openai_wire import Dialect, OpenAIWire
from handover.endpoint import Endpoint
from handover.errors import ConfigError

INPUTS = ("input_ids", "input_lengths", "request_output_len", "stop_words_list")
PAUSE_S = 0.02


class SlowTriton(FakeTriton):
    """Streams ``count_up`` token by token, as a decoupled model does, and notes how far each request came."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(lambda tensors: count_up(tensors), INPUTS, port=port)
        self.made: list[int] = []
        self.names: list[str] = []
        self.streams: list[int] = []  # requests of each
        self.is_old = False  # says in no answer whether it is the last one

    def ModelStreamInfer(self, requests: Any, context: Any) -> Any:  # noqa: N802
        stream = len(self.streams)
        self.streams.append(0)
        for request in requests:
            self.streams[stream] += 1
            (whole,) = self._answer(request, context)
            self.names.append(request.id)
            place, count = len(self.made), int(self.requests[-1]["request_output_len"].max())
            self.made.append(0)
            given = self.requests[-1]["input_ids"].shape[1]
            for number in range(1, count + 1):
                time.sleep(PAUSE_S)
                if not context.is_active():
                    return
                self.made[place] = number
                answer = pb.ModelInferResponse()
                answer.CopyFrom(whole)
                index = next(i for i, each in enumerate(answer.outputs) if each.name == "sequence_length")
                answer.raw_output_contents[index] = (given + number).to_bytes(4, "little")
                if not self.is_old:
                    answer.parameters["triton_final_response"].bool_param = number == count
                yield pb.ModelStreamInferResponse(infer_response=answer)


@pytest.fixture
def slow() -> Iterator[SlowTriton]:
    with SlowTriton() as running:
        yield running


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("letters")
    (directory / "vocab.json").write_text(json.dumps({chr(33 + number): number for number in range(90)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return directory


BODY = {"prompt": "A", "max_tokens": 30, "ignore_eos": True}


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_hangs_up_stops_its_request_within_two_tokens(
    slow: SlowTriton, letters: Path, tmp_path: Path, is_stream: bool
) -> None:
    log = tmp_path / "access.jsonl"

    async def inside() -> int:
        async with application_of(slow.url, letters, access_log=log) as client:
            if is_stream:
                async with client.post("/v1/completions", json={**BODY, "stream": True, "n": 2}) as answer:
                    await answer.content.readuntil(b"\n\n")
            else:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(client.post("/v1/completions", json={**BODY, "n": 2}), 0.2)
            gone_at = max(slow.made)
            await asyncio.sleep(0.5)
            again = await client.post("/v1/completions", json={"prompt": "A", "max_tokens": 2})
            assert (await again.json())["choices"][0]["text"] == "BC"
            return gone_at

    gone_at = asyncio.run(inside())
    assert max(slow.made[:2]) <= gone_at + 2 < 30
    assert [json.loads(line)["status"] for line in log.read_text().splitlines()] == [499, 200]


def test_the_load_client_hangs_up_and_the_request_ends_within_two_tokens(
    slow: SlowTriton, letters: Path, tmp_path: Path
) -> None:
    log = tmp_path / "access.jsonl"
    dialect = Dialect("fastertransformer", takes_ids=False, stream_fields={"return_token_ids": True})

    async def inside() -> list[RequestRecord]:
        async with application_of(slow.url, letters, access_log=log) as client:
            endpoint = Endpoint.read(str(client.make_url("/v1")))
            prompts = LoadPrompt((1,), 30, "A", cancel_after=4), LoadPrompt((1,), 3, "A")
            async with OpenAIWire(endpoint, dialect, 20.0, is_streaming=True) as wire:
                records = [await wire.ask(dialect.encode(prompt, is_streaming=True), 0) for prompt in prompts]
            await asyncio.sleep(0.3)
            return records

    cut, whole = asyncio.run(inside())
    assert (cut.is_cancelled, cut.error, cut.output_tokens) == (True, "", 4)
    assert slow.made[0] <= 4 + 2 and slow.made[1] == 3
    assert (whole.is_complete, whole.output_tokens) == (True, 3)
    assert [json.loads(line)["status"] for line in log.read_text().splitlines()] == [499, 200]


def test_a_stop_string_stops_the_engine(slow: SlowTriton, letters: Path) -> None:
    async def inside() -> str:
        async with application_of(slow.url, letters) as client:
            answer = await client.post("/v1/completions", json={**BODY, "stop": "DE"})
            found = await answer.json()
            await asyncio.sleep(0.2)
            return str(found["choices"][0]["text"])

    assert asyncio.run(inside()) == "BC" and slow.made[0] <= 6


@pytest.mark.parametrize(("is_old", "expected"), [(False, [1, 4, 1, 1]), (True, [1] * 7)])
def test_a_stream_serves_the_next_request_only_when_its_own_is_complete(
    slow: SlowTriton, letters: Path, is_old: bool, expected: list[int]
) -> None:
    slow.is_old = is_old

    async def inside() -> None:
        async with application_of(slow.url, letters) as client:

            async def text(**more: Any) -> str:
                body = {"prompt": "A", "max_tokens": 3, "ignore_eos": True, **more}
                return str((await (await client.post("/v1/completions", json=body)).json())["choices"][0]["text"])

            for _ in range(4):  # the first one finds out what the server says
                assert await text() == "BCD"
            assert await text(stop="C", max_tokens=30) == "B"  # is cancelled: what comes late is no other's answer
            assert await asyncio.gather(*(text(prompt=each) for each in "DK")) == ["EFG", "LMN"]

    asyncio.run(inside())
    assert slow.streams == expected


def test_nothing_is_left_of_requests_that_are_given_up_while_their_stream_begins(slow: SlowTriton) -> None:
    """A call whose beginning is cancelled would wait for the server's first words for ever, with its memory."""

    async def inside() -> set[asyncio.Task[Any]]:
        streams = Streams(slow.url)

        async def ask() -> None:
            async with aclosing(streams.ask(pb.ModelInferRequest(model_name="m"))) as answers:
                async for _ in answers:
                    raise AssertionError("the request was not given up")

        for turns in range(12):  # of the event loop, in which the call comes a little further each time
            asked = asyncio.create_task(ask())
            for _ in range(turns % 4):
                await asyncio.sleep(0)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        deadline = time.monotonic() + 240
        while len(left := asyncio.all_tasks() - {asyncio.current_task()}) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await streams.close()
        return {task for task in left if not task.done()}

    assert not asyncio.run(inside())


def test_a_stream_that_the_server_has_ended_is_replaced(slow: SlowTriton, letters: Path) -> None:
    async def inside() -> None:
        async with application_of(slow.url, letters) as client:
            for _ in range(2):
                answer = await client.post("/v1/completions", json={"prompt": "A", "max_tokens": 2})
                assert answer.status == 200
            slow.server.stop(None).wait()
            with SlowTriton(slow.port) as again:
                await asyncio.sleep(0.1)
                answer = await client.post("/v1/completions", json={"prompt": "A", "max_tokens": 2})
                assert answer.status == 200 and again.streams == [1]

    asyncio.run(inside())


@pytest.mark.parametrize("usage", [False, True])
def test_events_that_differ_by_their_text_alone_are_those_that_json_writes(
    slow: SlowTriton, letters: Path, usage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With token ids each event is written as a whole; the texts have what JSON escapes."""
    monkeypatch.setattr(sys.modules[__name__], "PAUSE_S", 0.001)

    async def inside(has_ids: bool) -> tuple[list[dict[str, Any]], bytes]:
        async with application_of(slow.url, letters) as client:
            body = {"prompt": "!", "max_tokens": 64, "stream": True, "n": 2, "return_token_ids": has_ids}
            body |= {"ignore_eos": True, "stream_options": {"include_usage": usage}}
            answer = await client.post("/v1/completions", json=body)
            content = await answer.read()
        events = [json.loads(each.removeprefix(b"data: ")) for each in content.split(b"\n\n")[:-2]]
        for event in events:
            assert event.pop("id") and event.pop("created")
            for choice in event["choices"]:
                assert (choice.pop("token_ids", None) is not None) is has_ids
                choice.pop("prompt_token_ids", None)
        events.sort(key=lambda event: [choice["index"] for choice in event["choices"]])  # two answers side by side
        return events, content[-14:]

    spliced, end = asyncio.run(inside(False))
    assert (spliced, end) == asyncio.run(inside(True)) and end == b"data: [DONE]\n\n"
    texts = [
        "".join(choice["text"] for event in spliced for choice in event["choices"] if choice["index"] == n)
        for n in (0, 1)
    ]
    assert texts == ["".join(chr(34 + number) for number in range(64))] * 2 and '"' in texts[0] and "\\" in texts[0]


def test_the_engine_hears_when_a_requests_body_was_there(slow: SlowTriton, letters: Path) -> None:
    """By the clock of this host, and not from the first byte on: a client may take its time with the body."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    sent_ns = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent_ns
        yield b'{"prompt": "A", '
        await asyncio.sleep(0.3)
        sent_ns = time.monotonic_ns()
        yield b'"max_tokens": 2, "n": 2}'

    async def inside() -> None:
        async with application_of(slow.url, letters) as client:
            answer = await client.post("/v1/completions", data=body(), headers={"Content-Type": "application/json"})
            assert answer.status == 200

    asyncio.run(inside())
    (host, first), (_, second) = (each["slipway_arrival"].split("/") for each in slow.sequences[-2:])
    assert host == boot_id and first == second
    assert sent_ns < int(first) < time.monotonic_ns() - int(PAUSE_S * 1e9)


def test_keys(slow: SlowTriton, letters: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys, log = tmp_path / "keys", tmp_path / "access.jsonl"
    keys.write_text("# operators\nfirst-secret\n\nsecond-secret\n")

    async def inside() -> None:
        async with application_of(slow.url, letters, api_keys_file=keys, access_log=log) as client:
            for header, status in (
                ({}, 401),
                ({"Authorization": "Bearer wrong"}, 401),
                ({"Authorization": "Basic first-secret"}, 401),
                ({"Authorization": "Bearer "}, 401),
                ({"Authorization": "Bearer first-secret"}, 200),
                ({"Authorization": "Bearer second-secret"}, 200),
                ({"Authorization": "bearer first-secret"}, 200),
                ({"Authorization": "BEARER  second-secret"}, 200),
                ({"Authorization": "Bearerfirst-secret"}, 401),
            ):
                async with client.get("/v1/models", headers=header) as answer:
                    assert answer.status == status
                    if status == 401:
                        assert (await answer.json())["error"]["code"] == "invalid_api_key"
                        assert answer.headers["WWW-Authenticate"] == "Bearer"
            for path in ("/tokenize", "/v1/completions", "/v1/nothing"):
                async with client.post(path, json={}) as answer:
                    assert answer.status == 401
            for path in ("/health", "/version", "/metrics"):
                async with client.get(path) as answer:
                    assert answer.status == 200

    asyncio.run(inside())
    said = log.read_text() + "".join(capfd.readouterr())
    assert "secret" not in said and "wrong" not in said


def test_a_file_without_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none\n\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "missing")


def test_the_clients_name_for_a_request_goes_all_the_way(slow: SlowTriton, letters: Path, tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"

    async def inside() -> None:
        async with application_of(slow.url, letters, access_log=log) as client:
            for stream in (False, True):
                body = {"prompt": "A", "max_tokens": 2, "stream": stream}
                async with client.post(
                    "/v1/completions", json=body, headers={"X-Request-Id": f"mine {stream}"}
                ) as answer:
                    assert answer.headers["X-Request-Id"] == f"mine {stream}"
                    assert f"cmpl-mine {stream}" in await answer.text()
            async with client.get("/v1/models", headers={"X-Request-Id": "x" * 200}) as answer:
                assert answer.headers["X-Request-Id"] != "x" * 200
            assert "Access-Control-Allow-Origin" not in answer.headers

    asyncio.run(inside())
    assert slow.names == ["mine False", "mine True"]
    first, second, third = map(json.loads, log.read_text().splitlines())
    assert [each["request_id"] for each in (first, second)] == slow.names
    assert first["path"] == "/v1/completions" and first["status"] == 200 and first["duration_ms"] > 0
    assert (
        (first["prompt_tokens"], first["completion_tokens"])
        == (1, 2)
        == (
            second["prompt_tokens"],
            second["completion_tokens"],
        )
    )
    assert third["method"] == "GET"


def test_requests_in_flight_are_answered_before_the_end(slow: SlowTriton, letters: Path, tmp_path: Path) -> None:
    """And a stream that takes longer than it may says that it is cut."""
    with openai_endpoint(slow.url, tmp_path, tokenizer=letters, end_id=1, exit_timeout_s=3) as endpoint:
        answers: list[Any] = []
        body = {**BODY, "prompt": "B", "max_tokens": 1000, "stream": True}
        asked = Request(
            f"{endpoint.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(asked, timeout=180) as stream:
            stream.readline()
            thread = threading.Thread(target=lambda: answers.append(endpoint.get("/v1/completions", BODY)))
            thread.start()
            while len(slow.made) < 2:
                time.sleep(0.01)
            endpoint.process.send_signal(signal.SIGTERM)
            last = stream.read().strip().split(b"\n\n")[-1]
        thread.join(240)
        assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "server_error"
        assert answers[0][0] == 200 and answers[0][1]["usage"]["completion_tokens"] == 30
        assert endpoint.process.wait(240) == 0


def test_slow_and_cut_connections_hold_up_no_other_request(slow: SlowTriton, letters: Path) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
    wrong = (
        b"\0" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        head,
    )

    async def inside() -> None:
        async with application_of(slow.url, letters) as client:
            sockets = []
            for number, content in enumerate(wrong * 10):
                opened = socket.create_connection((client.host, client.port or 0))
                opened.sendall(content + b'{"prompt"')
                if number % 2:
                    opened.close()
                sockets.append(opened)
            answer = await client.post("/v1/completions", json={"prompt": "A", "max_tokens": 2})
            assert (await answer.json())["choices"][0]["text"] == "BC"
            for opened in sockets:
                opened.close()

    asyncio.run(inside())


def test_several_processes_share_a_port_and_end_together(slow: SlowTriton, letters: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tokenizer": letters, "end_id": 1, "processes": 2}

    def children(endpoint: OpenAIEndpoint) -> list[int]:
        return [each.pid for each in list_processes() if each.parent == endpoint.process.pid]

    with openai_endpoint(slow.url, tmp_path, **settings) as endpoint:
        wait_for(lambda: endpoint.text.count("/v1") == 2)
        pids = children(endpoint)
        for _ in range(12):  # each by a connection of its own
            status, answer = endpoint.get("/v1/completions", {"prompt": "A", "max_tokens": 2})
            assert status == 200 and answer["choices"][0]["text"] == "BC"
        assert len(pids) == 2
    assert not [pid for pid in pids if look_up(pid)]


def has_started(endpoint: OpenAIEndpoint, times: int) -> bool:
    return endpoint.text.count("/v1") == times


def test_a_process_that_dies_is_replaced_three_times(slow: SlowTriton, letters: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tokenizer": letters, "end_id": 1, "processes": 2}

    def children() -> list[int]:
        return [each.pid for each in list_processes() if each.parent == endpoint.process.pid and each.state not in "ZX"]

    ended = pytest.raises(AssertionError, match="was killed by SIGKILL, the fourth within ten minutes")
    with ended, openai_endpoint(slow.url, tmp_path, **settings) as endpoint:
        wait_for(lambda: endpoint.text.count("/v1") == 2)
        for number in range(1, 4):
            dead = children()[0]
            os.kill(dead, signal.SIGKILL)
            wait_for(partial(has_started, endpoint, 2 + number))
            assert f"started again, {number} of 3" in endpoint.text and dead not in children()
            assert endpoint.get("/health")[0] == 200
        os.kill(children()[0], signal.SIGKILL)
        endpoint.process.wait(240)


@pytest.mark.parametrize(
    "begun", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"]
)
def test_a_connection_that_does_not_ask_in_time_is_closed(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_REQUEST_S", "IDLE_S"):
        monkeypatch.setattr(f"deployment.openai.listening.connections.{name}", 0.3)

    async def inside() -> bytes:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        assert runner.server is not None
        connections = Connections(runner.server, 10)
        server = await asyncio.get_running_loop().create_server(connections, "127.0.0.1", 0)
        sweeping = asyncio.create_task(connections.sweep())
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(begun)
        found = await asyncio.wait_for(reader.read(), 240)
        writer.close()
        sweeping.cancel()
        server.close()
        await runner.cleanup()
        return found

    with contextlib.suppress(ConnectionResetError):
        assert asyncio.run(inside()).startswith(b"HTTP/1.1 404" if begun.endswith(b"\r\n\r\n") else b"")


@pytest.mark.parametrize(("rows", "active", "most"), [(8, 1, 7), (8, 2, 3), (8, 50, 1), (1, 1, 1), (64, 1, 56)])
def test_a_request_with_many_answers_leaves_rows_to_others(rows: int, active: int, most: int) -> None:
    running: list[int] = []

    async def inside() -> None:
        service: Any = SimpleNamespace(active=active)
        share, now = Share(service, rows), 0

        async def generate() -> None:
            nonlocal now
            async with share:
                now += 1
                running.append(now)
                await asyncio.sleep(0.001)
                now -= 1

        await asyncio.gather(*(generate() for _ in range(100)))

    asyncio.run(inside())
    assert len(running) == 100 and max(running) == most


def test_a_server_that_is_gone_is_said_to_be(letters: Path) -> None:
    async def inside() -> None:
        with SlowTriton() as leaving:
            async with application_of(leaving.url, letters) as client:
                leaving.server.stop(None).wait()
                async with client.post("/v1/completions", json=BODY) as answer:
                    assert answer.status == 503 and (await answer.json())["error"]["type"] == "server_error"
                async with client.get("/health") as answer:
                    assert answer.status == 503

    asyncio.run(inside())
