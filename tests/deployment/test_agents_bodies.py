"""Bodies of the APIs for agents become bodies of chat completions, or are refused in words."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from support.servers.spoilt_bodies import spoilt

from deployment.openai.agents.asking import Ended
from deployment.openai.agents.blocks import CALL, TEXT, THOUGHTS, Blocks
from deployment.openai.agents.messages import Messages
from deployment.openai.agents.responses import Response
from deployment.openai.bodies.body import check_fields
from deployment.openai.bodies.fields import CHAT
from deployment.openai.conversations import StoredConversations
from deployment.openai.errors import ApiError
from deployment.openai.tools.reading import CallPart, Part

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
MESSAGES: dict[str, Any] = {
    "max_tokens": 4, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"], "stream": False,
    "thinking": {"type": "disabled"}, "tool_choice": {"type": "tool", "name": "f"},
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "c"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]},
            {"type": "text", "text": "e"},
        ]},
    ],
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "instructions": "s", "max_output_tokens": 4, "text": {"format": {"type": "text"}}, "reasoning": {"effort": "none"},
    "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": False}],
    "tool_choice": {"type": "function", "name": "f"}, "store": False, "metadata": {"k": "v"},
    "input": [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": "c"}'},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        {"role": "user", "content": [{"type": "input_text", "text": "e"}]},
    ],
}  # fmt: skip


def service() -> Any:
    arguments = SimpleNamespace(shares_port=False)
    return SimpleNamespace(conversations=StoredConversations(), arguments=arguments)


def test_both_become_the_same_conversation() -> None:
    function = {"name": "f", "arguments": {"a": "c"}}
    said = (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {
            "role": "assistant", "content": "b", "reasoning_content": "t",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "user", "content": "e"},
    )  # fmt: skip
    for chat in (Messages(MESSAGES).chat, Response(RESPONSE, service()).chat):
        values = check_fields(json.loads(json.dumps(chat)), CHAT)
        assert values["messages"] == said
        assert values["tool_choice"] == ("function", "f") and values["reasoning_effort"] == "none"
        assert values["tools"][0]["function"]["parameters"] == SCHEMA


@pytest.mark.parametrize("kind", ["messages", "responses"])
def test_spoilt_bodies_are_refused_in_words(kind: str) -> None:
    draw, refused = random.Random(kind), 0
    for _ in range(1500):
        body: Any = MESSAGES if kind == "messages" else RESPONSE
        for _ in range(draw.randint(1, 2)):
            body = spoilt(body, draw)
        try:
            if not isinstance(body, dict):
                continue
            given = {key: value for key, value in body.items() if value is not None}
            chat = Messages(given).chat if kind == "messages" else Response(given, service()).chat
            check_fields(json.loads(json.dumps(chat)), CHAT)
        except ApiError:
            refused += 1
    assert refused > 400


@pytest.mark.parametrize("name", ["metadata", "prompt_cache_key", "text", "reasoning"])
def test_what_an_answer_repeats_is_what_json_can_hold(name: str) -> None:
    """Or a stream that has begun would end with nothing."""
    with pytest.raises(ApiError, match="half a character"):
        Response({**RESPONSE, name: {"k": ["\ud800"]}}, service())


def test_blocks_begin_and_end_in_order() -> None:
    blocks = Blocks()
    parts = [
        Part(reasoning="t"), Part(reasoning="u", content="a"), Part(content="b"),
        Part(calls=[CallPart(0, "", "1", "f")]), Part(calls=[CallPart(0, "{}"), CallPart(1, "{}", "2", "g")]),
    ]  # fmt: skip
    changes = [change for part in parts for change in blocks.add(part)] + list(blocks.end())
    assert [(block.kind, block.text, block.name) for block in blocks.all] == [
        (THOUGHTS, "tu", ""), (TEXT, "ab", ""), (CALL, "{}", "f"), (CALL, "{}", "g"),
    ]  # fmt: skip
    steps = [(change.block.index, "begin" if change.begins else change.text or "end") for change in changes]
    assert [index for index, _ in steps] == sorted(index for index, _ in steps)
    assert [step for step in steps if step[1] in ("begin", "end")] == [
        (index, step) for index in range(4) for step in ("begin", "end")
    ]


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_one_call_that_was_cut_is_incomplete(is_cut: bool) -> None:
    """In the item's own event too, by which agents run a call; the calls before it are whole."""
    api, blocks = Response(RESPONSE, service()), Blocks()
    list(api.begin("1", "m", 3))
    changes = list(blocks.add(Part(calls=[CallPart(0, "{}", "1", "f"), CallPart(1, '{"a', "2", "f")])))
    events = [event for change in [*changes, *blocks.end(is_cut)] for event in api.change(change)]
    items = [content["item"] for kind, content in events if kind == "response.output_item.done"]
    ((_, last),) = api.end(blocks.all, Ended(is_cut, None, True, 3, 4))
    assert [item["status"] for item in items] == ["completed", "incomplete" if is_cut else "completed"]
    assert last["response"]["output"] == items and last["response"]["status"] == items[-1]["status"]


def test_stored_conversations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployment.openai.conversations._MOST", 2)
    stored = StoredConversations()
    for name in "abcc":
        stored.keep(name, [{"role": "user", "content": name}])
    assert stored._size_bytes == 2 * len('[{"role": "user", "content": "b"}]')
    assert stored.find("a") is None and stored.find("c") == [{"role": "user", "content": "c"}]
    monkeypatch.setattr("deployment.openai.conversations.time.monotonic", lambda: float("inf"))
    assert stored.find("c") is None
