"""What the endpoint takes and refuses, in front of a fake server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from openai.types.chat import ChatCompletionMessage
from support.servers.fake_triton import T5_INPUTS, FakeTriton, RefusalError, Tensors, count_up, count_up_t5
from support.servers.openai_endpoint import application_of
from tokenizers import Tokenizer, models

from deployment.openai.bodies.body import check_fields, parse
from deployment.openai.bodies.fields import CHAT, COMPLETIONS, NEUTRAL, REFUSED
from deployment.openai.errors import ApiError

INPUTS = ("input_ids", "input_lengths", "request_output_len", "stop_words_list")


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of one id a letter."""
    directory = tmp_path_factory.mktemp("letters")
    (directory / "vocab.json").write_text(json.dumps({chr(33 + number): number for number in range(90)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return directory


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeTriton]:
    def answer(tensors: Tensors) -> Tensors:
        if tensors["request_output_len"].max() > 1000:
            raise RefusalError("too long")
        return count_up(tensors)

    with FakeTriton(answer, INPUTS) as running:
        yield running


def run(
    fake: FakeTriton, letters: Path, ask: Callable[[TestClient[Any, Any]], Awaitable[None]], **settings: Any
) -> None:
    async def inside() -> None:
        async with application_of(fake.url, letters, **settings) as client:
            await ask(client)

    asyncio.run(inside())


async def post(client: TestClient[Any, Any], path: str, body: Any) -> tuple[int, Any]:
    async with client.post(path, json=body) as answer:
        return answer.status, await answer.json()


def test_a_server_that_answers_whole_is_streamed_too(fake: FakeTriton, letters: Path) -> None:
    async def ask(client: TestClient[Any, Any]) -> None:
        body = {"prompt": "ABC", "max_tokens": 3, "stop": "G"}
        assert (await post(client, "/v1/completions", body))[1]["choices"][0]["text"] == "DEF"
        async with client.post("/v1/completions", json={**body, "stream": True, "stop": "F"}) as answer:
            events = (await answer.text()).split("\n\n")
        choices = [json.loads(event[6:])["choices"][0] for event in events[:-2]]
        assert [(each["text"], each["finish_reason"]) for each in choices] == [("D", None), ("E", None), ("", "stop")]

    run(fake, letters, ask)


def test_an_encoder_is_given_the_prompt_and_its_end(letters: Path) -> None:
    with FakeTriton(count_up_t5, (*T5_INPUTS, "stop_words_list")) as t5:

        async def ask(client: TestClient[Any, Any]) -> None:
            _, found = await post(client, "/v1/completions", {"prompt": "ABC", "max_tokens": 3})
            assert found["choices"][0]["text"] == "#$%" and found["usage"]["prompt_tokens"] == 4

        run(t5, letters, ask)
    assert t5.requests[0]["input_ids"].tolist() == [[32, 33, 34, 1]]


def test_the_tokenizers_own_special_tokens_are_named_and_numbered(fake: FakeTriton, tmp_path: Path) -> None:
    made = Tokenizer(models.BPE({chr(33 + number): number for number in range(60)}, []))
    made.add_special_tokens(["<|bos|>", "<|im_end|>", "<|pad|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    (tmp_path / "chat.json").write_text(json.dumps({"template": "{{ bos_token }}", "tokens": named}))

    async def ask(client: TestClient[Any, Any]) -> None:
        async with client.get("/tokenizer_info") as answer:
            info = await answer.json()
        assert {name: info[name] for name in ("bos_token", "pad_token")} == {
            "bos_token": "<|bos|>",
            "pad_token": "<|pad|>",
        }
        for number, name in ((60, "<|bos|>"), (62, "<|pad|>")):
            assert (await post(client, "/tokenize", {"prompt": name}))[1]["tokens"] == [number]

    run(fake, tmp_path, ask)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("min_tokens", 1),
            ("min_p", 0.1),
            ("frequency_penalty", 1),
            ("presence_penalty", 1),
            ("logit_bias", {"5": 1}),
        ],
        *[("guided_regex", "a"), ("response_format", {"type": "json_object"})],
    ],
)
def test_what_the_server_lacks_is_refused_by_name(fake: FakeTriton, letters: Path, name: str, value: Any) -> None:
    async def ask(client: TestClient[Any, Any]) -> None:
        status, found = await post(client, "/v1/completions", {"prompt": "A", name: value})
        assert status == 400 and found["error"]["param"] == name
        assert COMPLETIONS[name].goes_to in found["error"]["message"]

    run(fake, letters, ask)


def test_every_refused_field_says_what_to_do(fake: FakeTriton, letters: Path) -> None:
    async def ask(client: TestClient[Any, Any]) -> None:
        for name, advice in REFUSED.items():
            status, found = await post(client, "/v1/completions", {"prompt": "A", name: "x"})
            assert status == 400 and found["error"]["message"].endswith(advice), name

    run(fake, letters, ask)


def test_the_servers_refusal_is_passed_on(fake: FakeTriton, letters: Path) -> None:
    async def ask(client: TestClient[Any, Any]) -> None:
        for is_stream in (False, True):
            body = {"prompt": "A", "max_tokens": 1001, "stream": is_stream}
            status, found = await post(client, "/v1/completions", body)
            assert status == 400 and "too long" in found["error"]["message"]

    run(fake, letters, ask)


def test_without_a_chat_template_the_client_is_told_what_to_give(fake: FakeTriton, letters: Path) -> None:
    async def ask(client: TestClient[Any, Any]) -> None:
        body = {"messages": [{"role": "user", "content": "x"}]}
        status, found = await post(client, "/v1/chat/completions", body)
        assert (status, found["error"]["code"]) == (400, "no_chat_template")
        assert "--chat-template" in found["error"]["message"]

    run(fake, letters, ask)


@pytest.mark.parametrize(
    "body", [b'{"prompt": "A", "n": 1, "n": 2}', b'{"prompt": "A", "stream_options": {"x": 1, "x": 1}}']
)
def test_a_key_that_stands_twice_is_refused(fake: FakeTriton, letters: Path, body: bytes) -> None:
    async def ask(client: TestClient[Any, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        async with client.post("/v1/completions", data=body, headers=headers) as answer:
            assert answer.status == 400 and "stands twice" in (await answer.json())["error"]["message"]

    run(fake, letters, ask)


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "-Infinity", "9" * 5000])
def test_a_number_that_no_answer_could_repeat_is_refused(number: str) -> None:
    with pytest.raises(ApiError, match="the body is not JSON"):
        parse(f'{{"metadata": {{"a": [{number}]}}}}'.encode())


def test_limits(fake: FakeTriton, letters: Path) -> None:
    async def ask(client: TestClient[Any, Any]) -> None:
        assert (await post(client, "/v1/completions", {"prompt": ["A"] * 3, "n": 2}))[0] == 400
        assert (await post(client, "/v1/completions", {"prompt": "A" * 4000}))[0] == 413
        async with client.post("/v1/completions", data="{}", headers={"Content-Type": "text/plain"}) as answer:
            assert answer.status == 415

    run(fake, letters, ask, max_sequences=4, max_body_bytes=3000)


def test_no_more_requests_than_allowed_are_answered_at_a_time(letters: Path) -> None:
    import threading

    gate = threading.Event()

    def answer(tensors: Tensors) -> Tensors:
        gate.wait(240)
        return count_up(tensors)

    async def ask(client: TestClient[Any, Any]) -> None:
        body = {"prompt": "A", "max_tokens": 1}
        waiting = [asyncio.create_task(post(client, "/v1/completions", body)) for _ in range(2)]
        while len(slow.requests) < 2:
            await asyncio.sleep(0.01)
        async with client.post("/v1/completions", json=body) as refused:
            assert refused.status == 429 and int(refused.headers["Retry-After"]) > 0
            assert (await refused.json())["error"]["type"] == "rate_limit_error"
        gate.set()
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]
        assert (await post(client, "/v1/completions", body))[0] == 200

    with FakeTriton(answer, INPUTS) as slow:
        run(slow, letters, ask, max_requests=2)


def test_what_asks_for_nothing_is_as_if_it_were_left_out() -> None:
    """A message of an answer, as openai's own client writes it, is part of the next request."""
    said = ChatCompletionMessage(role="assistant", content="hi").model_dump()
    assert {"refusal", "annotations", "audio", "function_call", "tool_calls"} <= said.keys()
    said |= {"tool_calls": [], "name": None, "annotations": []}
    parts = [{"type": "text", "text": "a", "annotations": None, "cache_control": None}]
    read = check_fields({"messages": [said, {"role": "user", "content": parts}]}, CHAT)["messages"]
    assert read[0] == {"role": "assistant", "content": "hi"} and read[1]["content"][0]["text"] == "a"
    inner = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": None, "description": None}}
    for given in ({"stream_options": {"include_usage": None, "include_obfuscation": False}}, {"nonsense": None}):
        assert check_fields({**given}, CHAT) == check_fields({}, CHAT)
    assert check_fields({"response_format": {**inner, "grammar": None}}, CHAT)["response_format"]
    for values in ({name: [None, [], False, *values]} for name, values in NEUTRAL.items()):
        for name, several in values.items():
            assert all(check_fields({name: value}, COMPLETIONS) for value in several)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_logprobs", 0),
        ("tool_choice", "auto"),
        ("priority", 1),
        ("length_penalty", 2.0),
        ("parallel_tool_calls", 1),
    ],
)
def test_what_asks_for_something_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ApiError, match=f"{name} is not supported"):
        check_fields({name: value}, COMPLETIONS)
    with pytest.raises(ApiError, match="unknown key"):
        check_fields({"messages": [{"role": "user", "content": "a", "tool_calls": [{"id": "1"}]}]}, CHAT)
