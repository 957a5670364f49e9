"""Tools over a real deployment, by OpenAI's own client: the demonstration's Llama, which never learnt to call one."""

from __future__ import annotations

import json
import random
from collections import Counter
from enum import Enum
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from support.servers.llama_endpoint import MODEL

from benchmarks.clients.tool_calls import HELD, ToolCallArguments, draw_body
from benchmarks.clients.tool_calls import ask as ask_once


class Unit(str, Enum):
    celsius = "C"
    fahrenheit = "F"


class GetWeather(BaseModel):
    city: str = Field(max_length=9)
    days: Literal[1, 2, 7]
    unit: Unit


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "of a city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop_all"}},
]
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


def ask(client: openai.OpenAI, **given: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": ASKED, "tools": TOOLS, "seed": 1, **given})


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_is_one_of_the_tools(client: openai.OpenAI, seed: int) -> None:
    asked = {"tool_choice": "required", "max_tokens": 200, "parallel_tool_calls": False, "tools": TOOLS[seed % 2 :]}
    (choice,) = ask(client, seed=seed, temperature=0.3, **asked).choices
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_") and call.type == "function"
    if choice.finish_reason == "tool_calls":  # not cut off
        schemas = {"get_weather": SCHEMA, "stop_all": {"type": "object", "maxProperties": 0}}
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "stop_all"}}
    (choice,) = ask(client, tool_choice=named, max_tokens=100, temperature=0).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("stop_all", {})
    assert choice.finish_reason == "stop"


def test_a_stream_has_the_call_in_pieces(client: openai.OpenAI) -> None:
    asked = {"tool_choice": "required", "max_tokens": 200, "temperature": 0, "parallel_tool_calls": False}
    (whole,) = ask(client, **asked).choices
    chunks = list(ask(client, stream=True, **asked))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert not any(delta.content for delta in deltas)
    assert calls[0].id and calls[0].function.name == whole.message.tool_calls[0].function.name
    assert not any(call.id or call.function.name for call in calls[1:])
    arguments = "".join(call.function.arguments for call in calls)
    assert arguments == whole.message.tool_calls[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason
    assert len(calls) > 3


def test_openais_helpers_read_the_call(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    asked: Any = {"model": MODEL, "messages": ASKED, "tools": [tool], "tool_choice": "required", "temperature": 0}
    asked["parallel_tool_calls"] = False
    answer = client.chat.completions.parse(max_tokens=180, logit_bias={}, **asked)
    calls = answer.choices[0].message.tool_calls
    assert calls
    call = calls[0]
    assert isinstance(call.function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(max_tokens=180, **asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def test_every_complete_call_matches_as_the_benchmark_counts_it(client: openai.OpenAI) -> None:
    """A few of its prompts, with the tool that is asked for: the model has 512 positions."""
    arguments = ToolCallArguments(str(client.base_url).rstrip("/"), MODEL)
    draw, counts = random.Random(4), Counter[str]()
    for way in HELD * 3:
        tools = list[Any]()
        while not tools or len(json.dumps(tools)) > 300:
            body = draw_body(draw, way, arguments)
            words = body["messages"][0]["content"].split()
            tools = [tool for tool in body["tools"] if tool["function"]["name"] == f"{words[1]}_{words[3]}"]
        counts += ask_once(arguments, {**body, "tools": tools, "max_tokens": None})
    assert counts["answers"] == 9 and counts["calls"] >= 3
    assert counts["calls"] == counts["parsed"] == counts["matched"]


def test_a_conversation_with_results_goes_on(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    history: Any = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18 C"},
    ]
    answer = ask(client, messages=history, max_tokens=8, tool_choice="none")
    assert answer.choices[0].message.content and answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "length"


def test_thoughts_are_told_from_content(client: openai.OpenAI) -> None:
    """The prompt begins the thoughts; a grammar stands for a model that ends them."""
    grammar = 'start: "I see." "</think>" "\\n\\nYes" " or no"'
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "guided_grammar": grammar}
    asked: Any = {"tools": openai.NOT_GIVEN, "max_tokens": 60, "extra_body": extra}
    message = ask(client, **asked).choices[0].message
    assert (message.reasoning_content, message.content) == ("I see.", "Yes or no")
    deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True, **asked)]
    assert "".join(delta.content or "" for delta in deltas) == "Yes or no"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "I see."
    message = ask(client, **{**asked, "extra_body": {**extra, "include_reasoning": False}}).choices[0].message
    assert message.content == "Yes or no" and not hasattr(message, "reasoning_content")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "names 'weather', which is no tool"),
        ({"tools": [], "tool_choice": "required"}, "there are no tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "two functions called 'get_weather'"),
        ({"tools": [{"type": "web_search"}]}, "'function'"),
        ({"response_format": {"type": "json_object"}}, "exclude each other"),
        ({"extra_body": {"chat_template_kwargs": {"thinking": 1}}}, "it takes enable_thinking"),
        ({"extra_body": {"reasoning_effort": "high"}}, "takes no reasoning_effort"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "letters, digits"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client: openai.OpenAI, given: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        ask(client, **given)
