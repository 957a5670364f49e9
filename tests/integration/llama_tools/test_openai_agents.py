"""The Responses API by OpenAI's own client, and Anthropic's Messages by their wire form, over a real deployment."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
import pytest
from support.servers.llama_endpoint import MODEL

CITY = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}


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


def post(url: str, body: dict[str, Any], path: str = "messages") -> tuple[int, str]:
    request = Request(f"{url}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=180) as answer:
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


def events_of(answer: tuple[int, str]) -> list[dict[str, Any]]:
    assert answer[0] == 200, answer[1]
    lines = answer[1].splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def schema_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


READ, RUN = (
    schema_of(path={"enum": ["a.py", "b.py"]}),
    schema_of(command={"type": "array", "items": {"enum": ["ls", "-l"]}}),
)


def test_a_terminal_agent_goes_on_by_responses(url: str) -> None:
    """As Codex does it: every turn sends the whole conversation again, with thoughts, calls and what they gave."""
    body: dict[str, Any] = {
        "model": MODEL, "instructions": "You are an agent in a terminal.", "tool_choice": "auto", "store": False,
        "parallel_tool_calls": False, "reasoning": {"effort": "none", "summary": "auto"}, "stream": True,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0198", "temperature": 0,
        "tools": [{"type": "function", "name": "shell", "description": "Runs", "strict": False, "parameters": RUN}],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read only"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/w</cwd>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is here?"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        ],
        "max_output_tokens": 200,
    }  # fmt: skip
    for turn in range(2):
        events = events_of(post(url, {**body, "tool_choice": "required"}, "responses"))
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        (item,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert item["type"] == "function_call" and item["name"] == "shell"
        assert set(json.loads(item["arguments"])["command"]) <= {"ls", "-l"}
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": f"a.py {turn}"}
        body["input"] += [{key: item[key] for key in ("type", "name", "arguments", "call_id")}, result]
    last = events_of(post(url, {**body, "tools": [], "max_output_tokens": 4}, "responses"))
    (item,) = [event["item"] for event in last if event["type"] == "response.output_item.done"]
    assert item["type"] == "message" and last[-1]["response"]["usage"]["output_tokens"] == 4


def test_a_coding_agent_goes_on_by_messages(url: str) -> None:
    """As Claude Code does it: marks for caches, adaptive thinking, and the tokens counted beforehand."""
    mark = {"cache_control": {"type": "ephemeral"}}
    body: dict[str, Any] = {
        "model": MODEL, "max_tokens": 200, "stream": True, "temperature": 0, "metadata": {"user_id": "user_1"},
        "system": [{"type": "text", "text": "An agent.", **mark}, {"type": "text", "text": "Be short.", **mark}],
        "tools": [{"name": "Read", "input_schema": READ, "eager_input_streaming": True, **mark}],
        "thinking": {"type": "adaptive"}, "service_tier": "auto", "output_config": {},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "<reminder>no</reminder>"}, {"type": "text", "text": "Read a file", **mark},
        ]}],
    }  # fmt: skip
    for turn in range(2):
        asked = {**body, "tool_choice": {"type": "tool", "name": "Read"}}
        events = events_of(post(url, asked, "messages?beta=true"))
        counted = json.loads(post(url, {**asked, "stream": False}, "messages/count_tokens?beta=true")[1])
        assert counted == {"input_tokens": events[0]["message"]["usage"]["input_tokens"]}
        pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
        started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        assert [block["type"] for block in started] == ["tool_use"] and events[-1]["type"] == "message_stop"
        assert json.loads("".join(pieces))["path"] in ("a.py", "b.py")
        call = {**started[0], "input": json.loads("".join(pieces))}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "x = 1", "is_error": bool(turn), **mark}
        thought = {"type": "thinking", "thinking": "So.", "signature": ""}
        body["messages"] += [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]
    last = json.loads(post(url, {**body, "stream": False, "tools": [], "max_tokens": 4})[1])
    assert last["content"][0]["type"] == "text" and last["usage"]["output_tokens"] == 4
    status, content = post(url, {**body, "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}})
    assert status == 400 and "context_management.edits[0].keep" in content


def test_a_loop_of_tools_goes_on_by_chat_completions(url: str) -> None:
    """As OpenHands and others do it, through LiteLLM: null fields, results with a name, parts with marks for caches."""
    function = {"name": "execute", "description": "Runs", "parameters": RUN}
    body: dict[str, Any] = {
        "model": MODEL, "max_completion_tokens": 200, "temperature": 0, "top_p": 1.0, "stop": None, "seed": None,
        "tools": [{"type": "function", "function": function}], "service_tier": None, "safety_identifier": "me",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Act.", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": [{"type": "text", "text": "What is here?"}]},
        ],
    }  # fmt: skip
    for _ in range(2):
        status, content = post(url, {**body, "tool_choice": "required"}, "chat/completions")
        assert status == 200, content
        (choice,) = json.loads(content)["choices"]
        calls = choice["message"]["tool_calls"]
        assert calls[0]["function"]["name"] == "execute" and choice["message"]["content"] is None
        whole = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]
        assert all(set(json.loads(call["function"]["arguments"])["command"]) <= {"ls", "-l"} for call in whole)
        calls = calls[:1]
        calls[0]["function"]["arguments"] = '{"command": ["ls"]}'
        said = {"role": "assistant", "content": None, "tool_calls": calls, "function_call": None, "refusal": None}
        text = [{"type": "text", "text": "a.py", "cache_control": {"type": "ephemeral"}}]
        body["messages"] += [said, {"role": "tool", "tool_call_id": calls[0]["id"], "name": "execute", "content": text}]
    status, content = post(url, {**body, "tools": None, "max_completion_tokens": 4, "store": True}, "chat/completions")
    assert status == 400 and "/v1/responses keeps" in content
    status, content = post(url, {**body, "tool_choice": "none", "max_completion_tokens": 4}, "chat/completions")
    assert json.loads(content)["choices"][0]["message"]["content"]
