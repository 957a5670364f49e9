"""Anthropic's client, LangChain and LiteLLM, unmodified, call tools over a real deployment.

The model never learnt to call one: a call is asked for, and the schema says what it must be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import litellm
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr
from support.servers.llama_endpoint import MODEL, TOOLS_TEMPLATE, llama_endpoint

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with llama_endpoint(tmp_path_factory.mktemp("clients"), TOOLS_TEMPLATE) as endpoint:
        yield endpoint.url


@pytest.fixture(scope="module")
def claude(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


ASKED: Any = {
    "model": MODEL,
    "max_tokens": 300,
    "extra_body": {"temperature": 0},  # which newer models of Anthropic's own do not take
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [{"name": "get_weather", "description": "of a city", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


def test_anthropics_client_runs_a_tool_and_goes_on(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(**ASKED)
    (call,) = answer.content
    assert answer.stop_reason == "tool_use" and isinstance(call, anthropic.types.ToolUseBlock)
    jsonschema.validate(call.input, SCHEMA)
    with claude.messages.stream(**ASKED) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert "input_json" in kinds and kinds[-1] == "message_stop"
    assert [(block.name, block.input) for block in streamed.content if block.type == "tool_use"] == [
        ("get_weather", call.input)
    ]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (answer.stop_reason, answer.usage.output_tokens)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "18"}]}
    history = [
        *ASKED["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    final = claude.messages.create(**{**ASKED, "messages": history, "tool_choice": {"type": "none"}, "max_tokens": 6})
    assert final.content[0].type == "text" and final.stop_reason == "max_tokens"


def test_anthropics_client_reads_a_stream_of_text_and_a_refusal(claude: anthropic.Anthropic) -> None:
    asked: Any = {**ASKED, "tools": anthropic.NOT_GIVEN, "tool_choice": anthropic.NOT_GIVEN, "max_tokens": 8}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
    assert whole.content[0].type == "text" and text == whole.content[0].text
    with pytest.raises(anthropic.NotFoundError, match="there is no model"):
        claude.messages.create(**{**asked, "model": "no"})
    with pytest.raises(anthropic.BadRequestError, match="at most 2"):
        claude.messages.create(**{**asked, "extra_body": {"temperature": 7}})


@tool
def get_weather(unit: Literal["C", "F"], days: Literal[1, 2]) -> str:
    """Return the weather."""
    return f"{18 + days} {unit}"


class City(BaseModel):
    """A city."""

    size: Literal["small", "large"]


@pytest.mark.parametrize("has_responses", [False, True])
def test_langchain_runs_a_tool_and_goes_on(url: str, has_responses: bool) -> None:
    """By chat completions and by the Responses API."""
    model = ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key=SecretStr("none"), temperature=0, max_retries=0,
        max_completion_tokens=300, use_responses_api=has_responses,
    )  # fmt: skip
    bound = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    said: list[Any] = [HumanMessage("Weather?")]
    answer = bound.invoke(said)
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage) and str(result.content)[-1] in "CF"
    whole: Any = None
    for chunk in bound.stream(said):
        whole = chunk if whole is None else whole + chunk
    assert [each["args"] for each in whole.tool_calls] == [call["args"]]
    after = model.bind(max_tokens=6).invoke([*said, answer, result])
    assert after.text and not after.tool_calls
    city = model.with_structured_output(City, method="json_schema", strict=True).invoke("Paris")
    assert isinstance(city, City)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_calls_a_tool_whole_and_in_a_stream(url: str, provider: str) -> None:
    """Both of its providers speak to this endpoint: chat completions and Messages."""
    function = {"name": "get_weather", "parameters": SCHEMA}
    asked: Any = {
        "model": f"{provider}/{MODEL}", "api_base": f"{url}/v1" if provider == "openai" else url, "api_key": "none",
        "messages": ASKED["messages"], "tools": [{"type": "function", "function": function}], "max_tokens": 300,
        "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "num_retries": 0,
    }  # fmt: skip
    answer: Any = litellm.completion(**asked)
    (call,) = answer.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert answer.choices[0].finish_reason == "tool_calls" and answer.usage.completion_tokens > 0
    built: Any = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asked)))
    (streamed,) = built.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
    history = [
        *asked["messages"],
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "18"},
    ]
    after: Any = litellm.completion(**{**asked, "messages": history, "tool_choice": "none", "max_tokens": 6})
    assert after.choices[0].message.content and after.choices[0].finish_reason == "length"
