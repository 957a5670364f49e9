"""What no client can do to the others: 5,000 spoilt requests beside one that asks for three tokens, and others."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers.fake_triton import FakeTriton, count_up
from support.servers.openai_endpoint import OpenAIEndpoint, openai_endpoint

from deployment.openai.bodies.fields import CHAT, COMPLETIONS, DETOKENIZE, REFUSED, TOKENIZE

INPUTS = ("input_ids", "input_lengths", "request_output_len", "stop_words_list")
KEY, PLANTED = "sk-planted-0123456789", "plantedprompt"
WORST: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2.5, -2.5, 10**30, -(10**30), 1e308, "", "a", "\ufffd", "x" * 5000, [], [[]], [0],
    [1, 2], [-1], [2**31], ["a", 1], [["a"]], [[1], "b"], {}, {"a": 1}, {"type": "text"},
    [{"role": "user", "content": PLANTED}],
    [None], [[None]], {"1": 5}, {"-1": 5}, {"1": 1e9}, {"include_usage": "x"}, [1.5], [True], [10**30],
    [PLANTED] * 600, [[1]] * 600, PLANTED * 300,
)  # fmt: skip
PATHS = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHAT, "/tokenize": TOKENIZE, "/detokenize": DETOKENIZE}
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PLANTED}]},
    "/detokenize": {"tokens": [1, 2]},
}


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of one id a letter."""
    directory = tmp_path_factory.mktemp("letters")
    (directory / "vocab.json").write_text(json.dumps({chr(33 + number): number for number in range(90)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return directory


def spoilt(drawn: random.Random, path: str) -> bytes:
    """A body that is wrong in some way, or right by chance."""
    body: Any = dict(WHOLE.get(path, {"prompt": PLANTED}))
    for name in drawn.sample([*PATHS[path], *REFUSED, "unknown", "\ud800"], drawn.randrange(4)):
        body[name] = drawn.choice(WORST)
    if path.startswith("/v1"):
        body["max_tokens"] = 2
    content = json.dumps(body).encode()
    kind = drawn.randrange(9)
    if kind == 0:
        content = content[: drawn.randrange(len(content))]
    elif kind == 1:
        place = drawn.randrange(len(content))
        content = content[:place] + bytes([drawn.randrange(256)]) + content[place:]
    elif kind == 2:
        content = drawn.choice([b"[" * 50_000, b'{"a":' * 50_000, b'{"prompt":' + b"[" * 3000 + b"]" * 3000 + b"}"])
    elif kind == 3:
        content = drawn.choice(
            [b'{"n":' + b"9" * 5000 + b"}", b'{"temperature":NaN}', b"", b"null", b"\xff\xfe", b'"\\ud800"']
        )
    elif kind == 4:
        content = content[:-1] + b', "n": 1, "n": 2}'
    return content


def request(drawn: random.Random) -> bytes:
    """One request as it goes over the wire; the headers of some are spoilt too."""
    path = drawn.choice(["/v1/completions"] * 5 + ["/tokenize", "/detokenize"] + ["/v1/chat/completions"] * 2)
    content, encoding = spoilt(drawn, path), ""
    if drawn.randrange(12) == 0:
        encoding = drawn.choice(["gzip", "deflate", "br", "zstd", "identity", "\x01"])
        content = gzip.compress(content) if encoding == "gzip" and drawn.randrange(2) else content
    scheme = drawn.choice(["Bearer", "Bearer", "bearer", "BEARER"])
    lines = [
        f"POST {path} HTTP/1.1", "Host: a", "Content-Type: application/json", f"Authorization: {scheme} {KEY}",
        f"Content-Length: {len(content)}", *([f"Content-Encoding: {encoding}"] if encoding else []),
    ]  # fmt: skip
    kind = drawn.randrange(100)
    if kind == 0:  # a line ends as no line may
        return drawn.choice(["\n", "\r\r\n", "\r"]).join([*lines, "", ""]).encode() + content
    if kind < 3:
        lines[drawn.randrange(len(lines))] = drawn.choice(
            ["Content-Length: -1", "Transfer-Encoding: chunked", f"Bad Header {PLANTED}", ": x", "X: \x00", "X: é",
             "Content-Length: 5", f"GET /{PLANTED} HTTP/9.9", "TRACE * HTTP/1.1", "GET http://[::1 HTTP/1.1",
             "Upgrade: websocket", "Expect: 100-continue", "X: " + "y" * 9000, f"{KEY} / HTTP/1.1"]
        )  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode("utf-8") + content


def send(endpoint: OpenAIEndpoint, requests: list[bytes]) -> list[tuple[int, bytes]]:
    """Send requests one behind another on one connection; the answers up to where the endpoint closes it."""
    port = int(endpoint.url.rpartition(":")[2])
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), 60) as opened:
        threading.Thread(target=pump, args=(opened, b"".join(requests)), daemon=True).start()
        while more := receive(opened):
            received += more
    heads = [found.start() for found in re.finditer(rb"HTTP/1\.[01] \d\d\d ", received)]
    answers = [bytes(received[first:end]) for first, end in zip(heads, [*heads[1:], len(received)], strict=True)]
    return [(int(each[9:12]), each.partition(b"\r\n\r\n")[2]) for each in answers if each[9:12] != b"100"]


def pump(opened: socket.socket, content: bytes) -> None:
    try:
        opened.sendall(content)
        opened.shutdown(socket.SHUT_WR)
    except OSError:  # the endpoint has closed the connection
        pass


def receive(opened: socket.socket) -> bytes:
    try:
        return opened.recv(1 << 16)
    except ConnectionError:
        return b""


class Canary:
    """A client that asks for three tokens and for the endpoint's health, again and again."""

    def __init__(self, endpoint: OpenAIEndpoint) -> None:
        self._endpoint, self._is_over = endpoint, threading.Event()
        self.wrong: list[Any] = []
        self.count = 0
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Canary:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(240)

    def _ask(self) -> None:
        body = {"prompt": "AB", "max_tokens": 3, "ignore_eos": True}
        while not self._is_over.wait(0.02):
            status, found = self._endpoint.get("/v1/completions", body, Authorization=f"Bearer {KEY}")
            self.count += 1
            if (status, found["choices"][0]["text"] if status == 200 else found) != (200, "CDE"):
                self.wrong.append((status, found))
            if (health := self._endpoint.get("/health"))[0] != 200:
                self.wrong.append(health)


@pytest.fixture(scope="module")
def endpoint(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIEndpoint]:
    directory = tmp_path_factory.mktemp("endpoint")
    (directory / "keys").write_text(f"{KEY}\n")
    (directory / "chat.jinja").write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    files = {"api_keys_file": directory / "keys", "chat_template": directory / "chat.jinja"}
    log = {"access_log": directory / "access.jsonl"}
    with (
        FakeTriton(count_up, INPUTS) as fake,
        openai_endpoint(fake.url, directory, most_files=128, tokenizer=letters, end_id=1, **files, **log) as running,
    ):
        yield running


def test_5000_spoilt_requests_do_no_harm(endpoint: OpenAIEndpoint) -> None:
    drawn, statuses, started = random.Random(40), list[int](), time.monotonic()
    with Canary(endpoint) as canary:
        while len(statuses) < 5000:
            for status, content in send(endpoint, [request(drawn) for _ in range(drawn.randrange(1, 60))]):
                statuses.append(status)
                if status >= 400:
                    error = json.loads(content)["error"]
                    assert error["message"] and error.keys() == {"message", "type", "param", "code"}
    assert not canary.wrong and canary.count > 20
    assert not [status for status in statuses if status >= 500]
    assert statuses.count(200) > 100 and statuses.count(400) > 1000
    log, access = endpoint.text, (endpoint.output.parent / "access.jsonl").read_text()
    for secret in (KEY, PLANTED, "Traceback"):
        assert secret not in log and secret not in access
    assert len(log.splitlines()) <= 5 + time.monotonic() - started  # one a second


@pytest.mark.parametrize("end", ["\n", "\r\r\n"])
def test_neither_a_key_nor_a_prompt_of_a_malformed_request_is_logged(endpoint: OpenAIEndpoint, end: str) -> None:
    """A key that is read from a file with the line ends of another system has such a carriage return."""
    lines = f"Authorization: Bearer {KEY}", "Content-Length: 30", "Content-Type: application/json"
    content = f'{{"prompt": "{PLANTED}", "n": 1}}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{lines[0]}{end}" + end.join([*lines[1:], "", ""])
    ((status, answer),) = send(endpoint, [(head + content).encode()])
    assert status == 400 and "HTTP/1.1" in json.loads(answer)["error"]["message"]
    assert KEY not in endpoint.text and PLANTED not in endpoint.text and KEY.encode() not in answer


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_body_that_is_not_what_its_encoding_says_is_the_clients_mistake(
    endpoint: OpenAIEndpoint, encoding: str
) -> None:
    headers = {"Authorization": f"bearer {KEY}", "Content-Encoding": encoding}
    status, found = endpoint.get("/v1/completions", {"prompt": "A"}, **headers)
    assert status == 400 and encoding in found["error"]["message"]


def test_a_compressed_body_is_read_as_far_as_it_may_go(endpoint: OpenAIEndpoint) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json"
    for content, expected in ((b'{"prompt": "A", "max_tokens": 2}', 200), (b" " * (9 << 20), 413)):
        packed = gzip.compress(content)
        sent = f"{head}\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n".encode() + packed
        assert [status for status, _ in send(endpoint, [sent])] == [expected]


def test_a_client_that_closes_its_own_direction_is_answered(endpoint: OpenAIEndpoint) -> None:
    content = b'{"prompt": "A", "max_tokens": 2}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: BEARER {KEY}\r\nContent-Type: application/json"
    answers = send(endpoint, [f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content])
    assert [status for status, _ in answers] == [200]
    assert json.loads(answers[-1][1])["choices"][0]["text"] == "BC"


def cpu_s(endpoint: OpenAIEndpoint) -> float:
    """Processor time of the endpoint's own process, in which its event loop is all that takes long."""
    found = re.search(r"^process_cpu_seconds_total (\S+)$", endpoint.get("/metrics")[1], re.MULTILINE)
    assert found
    return float(found.group(1))


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"prompt": [[5]] * 100_000}, "the request asks for 100000 answers"),
        ("/v1/completions", {"prompt": ["A" * 4000] * 513}, "the request asks for 513 answers"),
        ("/v1/completions", {"prompt": "AB" * 700_000}, "prompt has 1400000 bytes"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "AB" * 700_000}]}, "messages has 1400000"),
        ("/tokenize", {"prompt": "AB" * 300_000, "return_token_strs": True}, ""),
        ("/detokenize", {"tokens": [40] * 600_000}, ""),
    ],
)
def test_a_long_request_is_no_work_for_the_process_that_others_wait_for(
    endpoint: OpenAIEndpoint, path: str, body: dict[str, Any], expected: str
) -> None:
    before = cpu_s(endpoint)
    status, found = endpoint.get(path, body, Authorization=f"Bearer {KEY}")
    assert cpu_s(endpoint) - before < 0.15
    assert status == (400 if expected else 200)
    assert found["error"]["message"].startswith(expected) if expected else found.get("count", 600_000) == 600_000


def test_silent_connections_keep_no_client_out(endpoint: OpenAIEndpoint) -> None:
    """The endpoint may open 128 files; each of these connections is one."""
    port, lines = int(endpoint.url.rpartition(":")[2]), len(endpoint.text.splitlines())
    silent = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(200)]
    begun = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(100)]
    for opened in begun:
        with contextlib.suppress(ConnectionError):
            opened.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
    assert endpoint.get("/health")[0] == 200
    body = {"prompt": "A", "max_tokens": 2}
    assert endpoint.get("/v1/completions", body, Authorization=f"Bearer {KEY}")[0] == 200
    for opened in (*silent, *begun):
        opened.close()
    assert len(endpoint.text.splitlines()) < lines + 10
