"""The Responses API by OpenAI's own client, and Anthropic's Messages by their wire form, over a real deployment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
import pytest
from support.llama_endpoint import MODEL, TOOLS_TEMPLATE, llama_endpoint

CITY = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with llama_endpoint(tmp_path_factory.mktemp("agents"), TOOLS_TEMPLATE) as endpoint:
        yield endpoint.url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


TOOL: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}


def test_a_response_is_text_and_can_be_continued(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
    first = client.responses.create(input="Once upon a time", store=True, instructions="Go on.", **asked)
    assert first.status == "incomplete" and first.incomplete_details and first.output_text
    assert first.incomplete_details.reason == "max_output_tokens"
    assert first.usage and first.usage.output_tokens == 8
    further = client.responses.create(input="And then?", previous_response_id=first.id, **asked)
    said: Any = [
        {"role": "user", "content": "Once upon a time"},
        {"role": "assistant", "content": [{"type": "output_text", "text": first.output_text}]},
        {"role": "user", "content": "And then?"},
    ]
    whole = client.responses.create(input=said, **asked)
    assert further.output_text == whole.output_text and further.usage and whole.usage
    assert further.usage.input_tokens == whole.usage.input_tokens
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Once upon a time"}], temperature=0, max_tokens=8
    )
    alone = client.responses.create(input="Once upon a time", **asked)
    assert alone.output_text == chat.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="kept for an hour"):
        client.responses.create(input="a", previous_response_id=further.id, model=MODEL)


def test_a_response_calls_a_tool_whole_and_in_a_stream(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "Weather?", "tools": [TOOL], "tool_choice": "required", "temperature": 0}
    asked |= {"parallel_tool_calls": False, "max_output_tokens": 120}
    whole = client.responses.create(**asked)
    (call,) = whole.output
    assert call.type == "function_call" and json.loads(call.arguments)["unit"] in ("C", "F")
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    (streamed,) = final.output
    assert streamed.type == "function_call" and streamed.arguments == call.arguments and final.status == "completed"
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-3:] == [
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    result: Any = [
        {"role": "user", "content": "Weather?"},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "18"},
    ]
    after = client.responses.create(model=MODEL, input=result, tools=[TOOL], tool_choice="none", max_output_tokens=4)
    assert after.output_text


def test_a_stream_of_text_has_all_its_events(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "Once", "temperature": 0, "max_output_tokens": 6}
    events: Any = list(client.responses.create(stream=True, **asked))
    kinds = [event.type for event in events]
    assert events[-1].response.output_text == client.responses.create(**asked).output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip


def test_a_response_follows_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    answer = client.responses.create(model=MODEL, input="Say", text=form, temperature=0, max_output_tokens=300)
    assert json.loads(answer.output_text)["unit"] in ("C", "F")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools of other types"),
        ({"background": True}, "background is not supported"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "function_call_output"),
        ({"input": []}, "list of items"),
        ({"reasoning": {"effort": "high"}}, "reasoning_effort"),
        ({"extra_body": {"best": 1}}, "unknown key"),
    ],
)
def test_what_a_response_cannot_be_is_refused_by_name(client: openai.OpenAI, given: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.responses.create(**{"model": MODEL, "input": "a", **given})


def post(url: str, body: dict[str, Any]) -> tuple[int, str]:
    request = Request(f"{url}/v1/messages", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_messages_are_answered_in_anthropics_form(url: str, client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0, "system": "Go on."}
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "Once upon a time"}]}]
    status, content = post(url, body)
    answer = json.loads(content)
    assert status == 200 and answer["type"] == "message" and answer["role"] == "assistant"
    assert answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == 8
    said: Any = [{"role": "system", "content": "Go on."}, {"role": "user", "content": "Once upon a time"}]
    chat = client.chat.completions.create(model=MODEL, messages=said, temperature=0, max_tokens=8)
    assert answer["content"] == [{"type": "text", "text": chat.choices[0].message.content}]


def test_messages_call_a_tool_whole_and_in_a_stream(url: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 120, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": "Weather?"}]}
    body |= {"tools": [{"name": "get_weather", "input_schema": CITY}]}
    body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    answer = json.loads(post(url, body)[1])
    (call,) = answer["content"]
    assert answer["stop_reason"] == "tool_use" and call["type"] == "tool_use" and call["input"]["unit"] in ("C", "F")
    events = [event.split("\n") for event in post(url, {**body, "stream": True})[1].strip().split("\n\n")]
    kinds = [lines[0].removeprefix("event: ") for lines in events]
    told = [json.loads(lines[1].removeprefix("data: ")) for lines in events]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds == [each["type"] for each in told]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    pieces = [each["delta"]["partial_json"] for each in told if each["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == call["input"] and len(pieces) > 1
    assert told[-2]["delta"]["stop_reason"] == "tool_use"
    body["messages"] += [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "18"}]},
    ]
    body |= {"tool_choice": {"type": "none"}, "max_tokens": 4}
    assert json.loads(post(url, body)[1])["content"][0]["type"] == "text"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools of the server's own"),
        ({"messages": [{"role": "system", "content": "a"}]}, "is the field system"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "tool_result of the user"),
        ({"temperature": 7}, "at most 2"),
        ({"model": "no"}, "there is no model"),
    ],
)
def test_what_a_message_cannot_be_is_refused_by_name(url: str, given: dict[str, Any], said: str) -> None:
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}], **given}
    status, content = post(url, body)
    error = json.loads(content)
    assert status in (400, 404) and error["type"] == "error" and said in error["error"]["message"]
