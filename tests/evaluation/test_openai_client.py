"""The client of OpenAI APIs: what it asks, what it reads, and every way in which an endpoint can be wrong."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.servers.openai_stand_in import NAME, StandIn, serving

from evaluation.client.errors import RequestError, UnreachableError
from evaluation.client.openai_capabilities import find_capabilities
from evaluation.client.openai_client import OpenAIClient
from evaluation.client.served_identity import check_still_served
from evaluation.client.served_model import open_target
from handover.endpoint import Endpoint
from handover.errors import ConfigError, SlipwayError

JSON = {"Content-Type": "application/json"}
KEY = "sk-a1b2c3d4"


def asked(served: StandIn, timeout_s: float = 10, retries: int = 3, key_env: str | None = None) -> OpenAIClient:
    return client_of(served.url, timeout_s, retries, key_env)


def client_of(url: str, timeout_s: float, retries: int = 3, key_env: str | None = None) -> OpenAIClient:
    return OpenAIClient(Endpoint.read(url, key_env), timeout_s, retries)


def test_what_an_endpoint_can_do_is_found_by_asking() -> None:
    with serving(StandIn()) as served, asked(served) as client:
        found = find_capabilities(client, client.find_model("fastertransformer"))
    assert found.takes_ids and found.can_score and found.scores_alone and found.names_ids and found.returns_ids
    assert found.ignores_end and found.counts_tokens and not found.refusals
    assert (found.card.id, found.card.max_positions, found.version) == (NAME, 128, "0.1")
    assert found.line() == (
        "OpenAI API of stand-in 0.1: org/tiny, 128 positions; token ids as prompts, log probabilities of prompts"
        " (echo), tokens by id, ignore_eos, usage"
    )


def test_what_an_endpoint_cannot_do_is_said_in_its_own_words() -> None:
    plain = StandIn(extensions=frozenset(), echoes=False, takes_ids=False, max_model_len=None, version="")
    plain.encode = lambda text: [5] * len(text.split())
    with serving(plain) as served, asked(served) as client:
        found = find_capabilities(client, client.find_model(NAME))
    assert not (found.takes_ids or found.can_score or found.names_ids or found.returns_ids or found.ignores_end)
    assert "prompt must be a string" in found.why_not("token ids as prompts")
    assert "not supported for this model" in found.why_not("echo with logprobs")
    assert "Unrecognized request argument supplied: ignore_eos" in found.why_not("ignore_eos")
    assert "an unknown number of positions" in found.line() and "; no token ids as prompts" in found.line()


def test_an_endpoint_that_accepts_a_field_and_ignores_it_is_found_out() -> None:
    with serving(StandIn(end_id=14)) as served, asked(served) as client:
        card = client.find_model(NAME)
        completed = client.complete
        dropped = ("ignore_eos", "return_token_ids", "return_tokens_as_token_ids", "echo")

        def ignoring(model: str, prompts: list[list[int]], **fields: object) -> object:
            return completed(model, prompts, **{name: value for name, value in fields.items() if name not in dropped})

        client.complete = ignoring  # type: ignore[method-assign,assignment]
        found = find_capabilities(client, card)
    assert not (found.scores_prompts or found.names_ids or found.returns_ids or found.ignores_end)
    assert found.why_not("ignore_eos") == "the field is accepted and has no effect"


def test_the_key_comes_from_the_environment_and_no_message_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(StandIn(key=KEY)) as served:
        with pytest.raises(ConfigError, match=r"\$WORK_KEY, which should hold the key .* is not set"):
            asked(served, key_env="WORK_KEY")
        monkeypatch.setenv("WORK_KEY", f"{KEY}\n")
        with asked(served, key_env="WORK_KEY") as client:
            assert client.find_model(NAME).id == NAME
        assert served.headers[-1]["Authorization"] == f"Bearer {KEY}"
        monkeypatch.setenv("WORK_KEY", "sk-wrong")
        with asked(served, key_env="WORK_KEY") as client, pytest.raises(UnreachableError) as refused:
            client.models()
        assert "refuses the key in $WORK_KEY (HTTP 401)" in str(refused.value) and "sk-wrong" not in str(refused.value)
        with asked(served) as client, pytest.raises(UnreachableError, match="refuses a request without a key"):
            client.models()
        monkeypatch.setenv("WORK_KEY", "two words")
        with pytest.raises(ConfigError, match="holds characters that no key has") as odd:
            asked(served, key_env="WORK_KEY")
        assert "two words" not in str(odd.value)


def test_a_busy_server_is_waited_for_as_long_as_it_asks() -> None:
    served = StandIn(faults=[(429, {"Retry-After": "0.3"}, b"{}"), (503, {"Retry-After": "0"}, b"{}")])
    with serving(served), asked(served) as client:
        started = time.monotonic()
        assert client.find_model(NAME).id == NAME
    assert 0.3 <= time.monotonic() - started < 5


def test_a_date_to_wait_for_counts_from_the_servers_own_clock() -> None:
    late = {"Date": "Mon, 01 Jan 2035 00:00:00 GMT", "Retry-After": "Mon, 01 Jan 2035 00:00:01 GMT"}

    def answer(connection: socket.socket, number: int) -> None:
        if number:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n" + b'{"data": []}')
            return
        lines = "".join(f"{name}: {text}\r\n" for name, text in late.items())
        connection.sendall(f"HTTP/1.1 429 Busy\r\n{lines}Content-Length: 0\r\n\r\n".encode())

    with raw_server(answer) as url, client_of(url, 10) as client:
        started = time.monotonic()
        assert client.models() == ()
    assert 0.9 < time.monotonic() - started < 5


def test_a_server_that_stays_busy_is_not_waited_for_beyond_the_limits() -> None:
    said = json.dumps({"error": {"message": "quota of today is used up"}}).encode()
    for headers, most_s in (({"Retry-After": "3600"}, 1), ({"Retry-After": "0"}, 1), ({}, 5)):
        served = StandIn(faults=[(429, {**JSON, **headers}, said)] * 9)
        with serving(served), asked(served) as client:
            started = time.monotonic()
            with pytest.raises(RequestError, match=r"HTTP 429\): quota of today is used up"):
                client.models()
            assert time.monotonic() - started < most_s


@pytest.mark.parametrize(
    ("status", "headers", "content", "words"),
    [
        (200, {"Content-Type": "text/html"}, b"<html><h1>Sign in</h1></html>", "text/html that is not JSON: <html>"),
        (404, {"Content-Type": "text/html"}, b"<h1>no such page</h1>", "HTTP 404.: <h1>no such page"),
        (302, {"Location": "https://elsewhere/login"}, b"", "redirects to https://elsewhere/login"),
        (200, {**JSON, "Content-Length": "99"}, b'{"data": [', "was cut off"),
        (200, JSON, b'{"data": [', "not JSON"),
        (200, JSON, b'{"object": "list"}', "lists no models"),
        (200, JSON, b"[1, 2]", "lists no models"),
        (500, JSON, b'{"object": "error", "message": "EngineDeadError"}', "HTTP 500.: EngineDeadError"),
        (422, JSON, b'{"detail": [{"msg": "field required"}]}', "field required"),
        (200, JSON, b'{"error": {"message": "out of memory"}}', "out of memory"),
    ],
)
def test_a_wrong_answer_is_one_clear_error(status: int, headers: dict[str, str], content: bytes, words: str) -> None:
    with serving(StandIn(faults=[(status, headers, content)])) as served, asked(served) as client:
        with pytest.raises(RequestError, match=words):
            client.models()
        assert client.find_model(NAME).id == NAME  # the client is still of use


@contextmanager
def raw_server(answer: Callable[[socket.socket, int], None]) -> Iterator[str]:
    """Accept connections and have each answered by a function, which gets its number."""
    listener = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def serve() -> None:
        number = 0
        while not stopped.is_set():
            connection, _ = listener.accept()
            with connection:
                if stopped.is_set():
                    return
                connection.recv(1 << 16)
                with contextlib.suppress(OSError):  # the client has left
                    answer(connection, number)
            number += 1

    thread = threading.Thread(target=serve)
    thread.start()
    port = listener.getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        stopped.set()
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()
        listener.close()


def dribble(connection: socket.socket, number: int) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    for _ in range(100):
        connection.sendall(b"a")
        time.sleep(0.05)


def test_a_server_that_sends_a_byte_now_and_then_does_not_hang_a_request() -> None:
    with raw_server(dribble) as url, client_of(url, 0.5) as client:
        started = time.monotonic()
        with pytest.raises(RequestError, match=r"gave no answer within 0.5 s"):
            client.models()
        assert time.monotonic() - started < 3


def test_a_server_that_closes_without_an_answer_is_asked_again_and_then_an_error() -> None:
    seen: list[int] = []
    said = "gave no answer: Remote end closed"
    silent = raw_server(lambda _, number: seen.append(number))
    with silent as url, client_of(url, 5, 2) as client, pytest.raises(RequestError, match=said):
        client.models()
    assert len(seen) == 3


def test_what_is_no_http_server_is_named() -> None:
    other = raw_server(lambda connection, _: connection.sendall(b"\x00\x00\x12\x04 grpc\r\n\r\n"))
    with other as url, client_of(url, 5, 0) as client, pytest.raises(RequestError, match="does not speak HTTP"):
        client.models()


def test_no_server_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = OpenAIClient(Endpoint.read(f"http://127.0.0.1:{port}/v1"), 600, 1)
    with client, pytest.raises(UnreachableError, match=f"no server answers at http://127.0.0.1:{port}"):
        client.models()


EVENTS = b"".join(b"data: %d\n\n" % number for number in range(3))


@pytest.mark.parametrize("ending", [b"data: [DONE]\n\n", b"", b'data: {"error": {"message": "engine died"}}\n\n'])
def test_a_stream_is_read_to_its_last_event_or_is_an_error(ending: bytes) -> None:
    headers = {"Content-Type": "text/event-stream; charset=utf-8"}
    with serving(StandIn(faults=[(200, headers, EVENTS + ending)])) as served, asked(served) as client:
        found: list[object] = []
        if b"DONE" in ending:
            found += client.stream("/v1/completions", {})
        else:
            with pytest.raises(RequestError, match="engine died" if ending else "cut off before its last event"):
                found.extend(client.stream("/v1/completions", {}))
        assert client.find_model(NAME).id == NAME
    assert found == [0, 1, 2] or b"DONE" not in ending


def test_the_model_is_chosen_by_name_or_is_the_only_one() -> None:
    two = {"data": [{"id": "a", "root": "x"}, {"id": "b", "root": "y"}]}
    with serving(StandIn()) as served, asked(served) as client:
        with pytest.raises(ConfigError, match="serves no model 'org/tinny'.*\n.*did you mean 'org/tiny'"):
            client.find_model("org/tinny")
        served.faults += [(200, JSON, json.dumps(two).encode())] * 2
        with pytest.raises(ConfigError, match="serves 2 models.*\n.*choose one by model=: a, b"):
            client.find_model("fastertransformer")
        assert client.find_model("b").root == "y"


@pytest.mark.parametrize(("owner", "positions"), [("vllm", 64), ("sglang", 57)])
def test_positions_are_those_that_a_prompt_may_fill(owner: str, positions: int) -> None:
    """Where SGLang 0.5 says 64, it refuses a prompt of 58 tokens and generates up to 62 in all: ``scheduler.py``."""
    with serving(StandIn(owned_by=owner, max_model_len=64)) as served:
        assert open_target(served.url, "", batch_size=1).served.max_positions == positions


def test_a_target_says_what_serves_and_notices_another_server() -> None:
    with serving(StandIn(owned_by="vllm", version="0.19.0")) as served:
        target = open_target(served.url, "fastertransformer", batch_size=7)
        assert (target.model, target.batch_size, target.url, target.served.max_positions) == (NAME, 7, served.url, 128)
        assert target.capabilities and target.interface.can_score
        assert target.identity == {
            **{"model": NAME, "engine": "vllm", "model_digest": "", "api": "OpenAI", "address": served.url},
            **{"model_root": "/models/tiny", "max_model_len": "128"},
            **{"server": "vllm 0.19.0", "versions": "vllm 0.19.0"},
        }
        check_still_served(target.served.endpoint, target.model)
        served.version = "0.20.0"
        with pytest.raises(SlipwayError, match="serves something else than when this began.*0.20.0"):
            check_still_served(target.served.endpoint, target.model)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("htp://host:8000/v1", "has the scheme 'htp'"),
        ("http://host:8000", "does not end with /v1.*\n.*give http://host:8000/v1"),
        ("http://host:8000/v1/completions", "give http://host:8000/v1;"),
        ("https://me:secret@host/v1", "has a user or a password"),
        ("http://host:8000/v1?key=1", "is not http://host:port/v1"),
        ("http://host:99999/v1", "is not a URL: Port out of range"),
        ("http://:80/v1", "is not http://host:port/v1"),
    ],
)
def test_a_url_that_is_no_base_url_is_refused_with_what_is_legal(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        Endpoint.read(source)
    assert "secret" not in str(refused.value)


def test_an_endpoint_of_an_api_is_a_url_and_the_name_of_a_variable(tmp_path: Path) -> None:
    found = Endpoint.read("https://host/v1/", "KEY")
    assert (found.openai_url, found.host, found.http_port, found.openai_key_env) == (
        "https://host/v1",
        "host",
        443,
        "KEY",
    )
    assert found.is_openai and found.address == "https://host/v1"
    with pytest.raises(SlipwayError, match="is an OpenAI API, and this needs Triton's gRPC"):
        found.grpc_url  # noqa: B018 (it raises)
    with pytest.raises(ConfigError, match="not the name of an environment variable") as refused:
        Endpoint.read("https://host/v1", KEY)
    assert KEY not in str(refused.value)
    with pytest.raises(ConfigError, match="is no OpenAI API, which alone takes a key"):
        Endpoint.read("host:8001", "KEY")
    assert not Endpoint.read("host:8001").is_openai
    found.write(tmp_path / "endpoint.json")
    assert Endpoint.read(tmp_path) == found
    assert Endpoint.read(tmp_path, "OTHER").openai_key_env == "OTHER"
