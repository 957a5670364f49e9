"""``POST /v1/responses``: OpenAI's API of responses, with text and functions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiohttp import web

from deployment.openai.agents.asking import Ended, Event, answer
from deployment.openai.agents.blocks import CALL, TEXT, THOUGHTS, Block, Change
from deployment.openai.agents.translating import Translated, take_list, take_texts
from deployment.openai.answers.reading import read_json
from deployment.openai.errors import ApiError
from deployment.openai.service import Service, service_of
from deployment.openai.values import boolean, checked_texts, object_of, refuse, text

_SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user")
_NEUTRAL = {
    "truncation": ("disabled",), "background": (False,), "service_tier": ("auto", "default"),
    "include": ([], ["reasoning.encrypted_content"]),  # thoughts are given as they are, so that nothing is encrypted
    "top_logprobs": (0,), "max_tool_calls": (), "prompt": (), "conversation": (), "stream_options": ({},),
}  # fmt: skip
"""Fields that are refused but for these values and null."""
_UNUSED = ("metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
_FIELDS = (
    "input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning", "store",
    "previous_response_id", *_SAME, *_UNUSED,
)  # fmt: skip
_TEXTS = ("input_text", "output_text", "text")


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer ``POST /v1/responses``."""
    given = object_of(await read_json(request), "the body", (*_FIELDS, *_NEUTRAL))
    for name, values in _NEUTRAL.items():
        if name in given and given[name] not in values:
            raise ApiError(f"{name} is not supported", "leave it out", param=name, code="unsupported_parameter")
    return await answer(request, Response(given, service_of(request)), bool(given.get("stream")))


class Response:
    """One request; see Api for what each method does.

    Args:
        given: its body.
        service: that has earlier conversations.

    Attributes:
        chat: as a body of chat completions.

    Raises:
        ApiError: it cannot be written as one.
    """

    def __init__(self, given: Mapping[str, Any], service: Service) -> None:
        self._given, self._stored, self._number = given, service.conversations, 0
        for name in given.keys() - {"input", "instructions"}:  # an answer repeats them
            checked_texts(given[name], name)
        self._is_stored = boolean(given.get("store", False), "store")
        earlier = given.get("previous_response_id")
        if (self._is_stored or earlier) and service.arguments.shares_port:
            raise ApiError(
                "store and previous_response_id need an endpoint of one process",
                "send the whole conversation as input, or deploy with openai_processes=1",
                param="store",
            )
        self._conversation = [*(self._earlier(earlier) if earlier else ()), *_items(given)]
        self.chat: dict[str, Any] = {name: given[name] for name in _SAME if name in given}
        before = [{"role": "system", "content": given["instructions"]}] if given.get("instructions") else []
        self.chat["messages"] = [*before, *self._conversation]
        if "max_output_tokens" in given:
            self.chat["max_completion_tokens"] = given["max_output_tokens"]
        if tools := given.get("tools"):
            listed = take_list(tools, "tools")
            self.chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(listed)]
        if "tool_choice" in given:
            self.chat["tool_choice"] = _choice(given["tool_choice"])
        self.chat |= _format(given.get("text"))
        effort = object_of(given.get("reasoning", {}), "reasoning", ("effort", "summary")).get("effort")
        if effort is not None:
            self.chat["reasoning_effort"] = effort

    def begin(self, identity: str, model: str, prompt_tokens: int) -> Iterable[Event]:
        self._id, self._model, self._created = f"resp_{identity}", model, time.time()
        response = self._written("in_progress", [], None, None)
        return [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]

    def change(self, change: Change) -> Iterable[Event]:
        block, event = change.block, self._event
        place: dict[str, Any] = {"output_index": block.index, "item_id": self._item_id(block)}
        part = {**place, "content_index": 0}
        done: dict[str, Any]
        if block.kind == CALL:
            name, done = "response.function_call_arguments", {"arguments": block.text, "name": block.name}
        elif block.kind == TEXT:
            name, done = "response.output_text", {"text": block.text, "logprobs": []}
        else:
            name, done = "response.reasoning_text", {"text": block.text}
        if change.begins:
            item = {**self._item(Block(block.kind, block.index, block.id, block.name)), "status": "in_progress"}
            begun = [event("response.output_item.added", output_index=block.index, item={**item, **_EMPTY[block.kind]})]
            if block.kind == TEXT:
                begun.append(event("response.content_part.added", **part, part=_text("")))
            return begun
        where = place if block.kind == CALL else part
        if change.text:
            more: dict[str, Any] = {"logprobs": []} if block.kind == TEXT else {}
            return [event(f"{name}.delta", **where, delta=change.text, **more)]
        ended = [event(f"{name}.done", **where, **done)]
        if block.kind == TEXT:
            ended.append(event("response.content_part.done", **part, part=_text(block.text)))
        return [*ended, event("response.output_item.done", output_index=block.index, item=self._item(block))]

    def end(self, blocks: Sequence[Block], ended: Ended) -> Iterable[Event]:
        kind = "incomplete" if ended.is_cut else "completed"
        return [self._event(f"response.{kind}", response=self.whole(blocks, ended))]

    def whole(self, blocks: Sequence[Block], ended: Ended) -> dict[str, Any]:
        status = "incomplete" if ended.is_cut else "completed"
        if self._is_stored:
            self._stored.keep(self._id, [*self._conversation, *_answered(blocks)])
        details = {"reason": "max_output_tokens"} if ended.is_cut else None
        return self._written(status, [self._item(block) for block in blocks], ended, details)

    def fail(self, error: ApiError) -> Event:
        said = error.body["error"]
        return self._event("error", message=said["message"], code=said["code"], param=said["param"])

    def _earlier(self, identity: Any) -> list[dict[str, Any]]:
        found = self._stored.find(text(identity, "previous_response_id"))
        if found is None:
            raise ApiError(
                f"there is no response '{str(identity)[:80]}'",
                "an answer is kept for an hour where store is true; else send the whole conversation as input",
                status=404,
                param="previous_response_id",
            )
        return found

    def _event(self, kind: str, **content: Any) -> Event:
        self._number += 1
        return kind, {"sequence_number": self._number - 1, **content}

    def _item_id(self, block: Block) -> str:
        kinds = {TEXT: "msg", THOUGHTS: "rs", CALL: "fc"}
        return f"{kinds[block.kind]}_{self._id.removeprefix('resp_')}_{block.index}"

    def _item(self, block: Block) -> dict[str, Any]:
        common = {"id": self._item_id(block), "status": "incomplete" if block.is_cut else "completed"}
        if block.kind == TEXT:
            return {**common, "type": "message", "role": "assistant", "content": [_text(block.text)]}
        if block.kind == THOUGHTS:
            content = [{"type": "reasoning_text", "text": block.text}]
            return {**common, "type": "reasoning", "summary": [], "content": content}
        call = {"call_id": block.id, "name": block.name, "arguments": block.text}
        return {**common, "type": "function_call", **call}

    def _written(
        self, status: str, output: list[dict[str, Any]], ended: Ended | None, details: dict[str, str] | None
    ) -> dict[str, Any]:
        given, usage = self._given, None
        if ended:
            usage = {
                "input_tokens": ended.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": ended.tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": ended.prompt_tokens + ended.tokens,
            }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "output": output,
            "usage": usage,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata", {}),
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": given.get("previous_response_id"),
            "reasoning": given.get("reasoning"),
            "store": self._is_stored,
            "temperature": given.get("temperature", 1.0),
            "text": given.get("text", {"format": {"type": "text"}}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": given.get("top_p", 1.0),
            "truncation": "disabled",
        }


_EMPTY: Mapping[str, dict[str, Any]] = {TEXT: {"content": []}, THOUGHTS: {"content": []}, CALL: {}}
"""What an item lacks of its content when it begins."""


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _answered(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    made = Translated()
    for block in blocks:
        if block.kind == TEXT:
            made.say("assistant", block.text)
        elif block.kind == THOUGHTS:
            made.think(block.text)
        else:
            made.call(block.id, block.name, block.text)
    return made.messages


def _items(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    value, made = given.get("input"), Translated()
    if isinstance(value, str):
        made.say("user", value)
        return made.messages
    if not isinstance(value, list) or not value:
        raise refuse("input", value, "a text, or a list of items")
    for index, each in enumerate(value):
        _add(made, each, f"input[{index}]")
    return made.messages


def _add(made: Translated, value: Any, name: str) -> None:
    keys = ("type", "role", "content", "call_id", "name", "arguments", "output", "summary")
    given = object_of(value, name, (*keys, "id", "status", "phase", "encrypted_content"))
    kind = given.get("type", "message")
    if kind == "message":
        role = given.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise refuse(f"{name}.role", role, "system, developer, user or assistant")
        if role != "assistant":
            made.close()
        made.say(role, take_texts(given.get("content"), f"{name}.content", _TEXTS))
    elif kind == "function_call":
        made.call(given.get("call_id"), given.get("name"), given.get("arguments", "{}"))
    elif kind == "function_call_output":
        made.result(given.get("call_id"), take_texts(given.get("output"), f"{name}.output", _TEXTS))
    elif kind == "reasoning":
        for index, part in enumerate(take_list(given.get("content") or [], f"{name}.content")):
            thought = object_of(part, f"{name}.content[{index}]", ("type", "text"))
            made.think(text(thought.get("text"), f"{name}.content[{index}].text"))
    else:
        raise refuse(f"{name}.type", kind, "message, function_call, function_call_output or reasoning")


def _tool(value: Any, name: str) -> dict[str, Any]:
    given = object_of(value, name, ("type", "name", "description", "parameters", "strict"))
    if given.get("type") != "function":
        raise refuse(f"{name}.type", given.get("type"), "'function': tools of other types are not offered")
    return {"type": "function", "function": {key: each for key, each in given.items() if key != "type"}}


def _choice(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    given = object_of(value, "tool_choice", ("type", "name"))
    return {"type": given.get("type"), "function": {"name": given.get("name")}}


def _format(value: Any) -> dict[str, Any]:
    given = object_of({} if value is None else value, "text", ("format", "verbosity"))
    if given.get("verbosity", "medium") != "medium":
        raise refuse("text.verbosity", given["verbosity"], "'medium', or left out")
    kinds = ("type", "name", "description", "schema", "strict")
    form = object_of(given.get("format", {"type": "text"}), "text.format", kinds)
    if form.get("type") != "json_schema":
        return {"response_format": {"type": form.get("type")}}
    return {"response_format": {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}}
