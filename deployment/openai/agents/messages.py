"""``POST /v1/messages``: Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiohttp import web

from deployment.openai.agents.asking import Ended, Event, answer, count
from deployment.openai.agents.blocks import TEXT, THOUGHTS, Block, Change
from deployment.openai.agents.translating import Translated, take_list, take_texts
from deployment.openai.answers.reading import read_json
from deployment.openai.errors import ApiError
from deployment.openai.values import object_of, refuse, text

_FIELDS = (
    "model", "messages", "system", "max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k", "tools",
    "tool_choice", "thinking", "output_config", "context_management", "metadata", "service_tier", "cache_control",
)  # fmt: skip
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_TOOL_KEYS = ("name", "description", "input_schema", "type", "strict")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer ``POST /v1/messages``, a failure in Anthropic's form too."""
    try:
        given = object_of(await read_json(request), "the body", _FIELDS)
        return await answer(request, Messages(given), bool(given.get("stream")))
    except ApiError as error:
        return web.json_response(_failure(error), status=error.status, headers=error.headers)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Answer ``POST /v1/messages/count_tokens``."""
    try:
        given = object_of(await read_json(request), "the body", _FIELDS)
        return web.json_response({"input_tokens": await count(request, Messages({**given, "max_tokens": 1}))})
    except ApiError as error:
        return web.json_response(_failure(error), status=error.status, headers=error.headers)


def _failure(error: ApiError) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.body["error"]["message"]}}


class Messages:
    """One request; see Api for what each method does.

    Attributes:
        chat: as a body of chat completions.

    Raises:
        ApiError: it cannot be written as one.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        for name in ("max_tokens", "messages"):
            if name not in given:
                raise ApiError(f"{name} is missing", "this field must be given", param=name)
        self.chat = {name: given[name] for name in _SAME if name in given}
        self.chat |= {"messages": _conversation(given)}
        if stops := given.get("stop_sequences"):
            self.chat["stop"] = stops
        if tools := given.get("tools"):
            listed = take_list(tools, "tools")
            self.chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(listed)]
        if "tool_choice" in given:
            self.chat |= _choice(given["tool_choice"])
        self.chat |= _effort(given) | _format(given)
        _check_edits(given.get("context_management") or {})
        self._head: dict[str, Any] = {}

    def begin(self, identity: str, model: str, prompt_tokens: int) -> Iterable[Event]:
        self._head = {"id": f"msg_{identity}", "type": "message", "role": "assistant", "model": model}
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [("message_start", {"message": message})]

    def change(self, change: Change) -> Iterable[Event]:
        block, index = change.block, {"index": change.block.index}
        if change.begins:
            empty = _written(Block(block.kind, 0, block.id, block.name))
            return [("content_block_start", {**index, "content_block": empty})]
        if not change.text:
            return [("content_block_stop", index)]
        kinds = {TEXT: ("text_delta", "text"), THOUGHTS: ("thinking_delta", "thinking")}
        kind, key = kinds.get(block.kind, ("input_json_delta", "partial_json"))
        return [("content_block_delta", {**index, "delta": {"type": kind, key: change.text}})]

    def end(self, blocks: Sequence[Block], ended: Ended) -> Iterable[Event]:
        usage = {"input_tokens": ended.prompt_tokens, "output_tokens": ended.tokens}
        return [("message_delta", {"delta": _ending(ended), "usage": usage}), ("message_stop", {})]

    def whole(self, blocks: Sequence[Block], ended: Ended) -> dict[str, Any]:
        usage = {"input_tokens": ended.prompt_tokens, "output_tokens": ended.tokens}
        return {**self._head, "content": [_written(block) for block in blocks], **_ending(ended), "usage": usage}

    def fail(self, error: ApiError) -> Event:
        return "error", {"error": _failure(error)["error"]}


def _ending(ended: Ended) -> dict[str, Any]:
    reason = "max_tokens" if ended.is_cut else "tool_use" if ended.has_called else "end_turn"
    return {"stop_reason": "stop_sequence" if ended.stop is not None else reason, "stop_sequence": ended.stop}


def _written(block: Block) -> dict[str, Any]:
    if block.kind == TEXT:
        return {"type": "text", "text": block.text}
    if block.kind == THOUGHTS:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        given = json.loads(block.text or "{}")
    except ValueError:  # it was cut off, which the reason to stop says
        given = {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}


def _effort(given: Mapping[str, Any]) -> dict[str, Any]:
    thinking = object_of(given.get("thinking") or {}, "thinking", ("type", "budget_tokens", "display"))
    kind = thinking.get("type", "enabled")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise refuse("thinking.type", kind, "'enabled', 'adaptive' or 'disabled'")
    if kind == "disabled":
        return {"reasoning_effort": "none"}
    effort = _output_config(given).get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _format(given: Mapping[str, Any]) -> dict[str, Any]:
    form = _output_config(given).get("format")
    if form is None:
        return {}
    asked = object_of(form, "output_config.format", ("type", "schema"))
    if asked.get("type") != "json_schema":
        raise refuse("output_config.format.type", asked.get("type"), "'json_schema'")
    schema = {"name": "output", "schema": asked.get("schema"), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _output_config(given: Mapping[str, Any]) -> Mapping[str, Any]:
    return object_of(given.get("output_config") or {}, "output_config", ("effort", "format"))


def _check_edits(value: Any) -> None:
    """Refuse edits of the conversation that would leave something out of it."""
    edits = object_of(value, "context_management", ("edits",)).get("edits") or []
    for index, edit in enumerate(take_list(edits, "context_management.edits")):
        name = f"context_management.edits[{index}]"
        kept = object_of(edit, name, ("type", "keep")).get("keep")
        if kept != "all":
            raise refuse(f"{name}.keep", kept, "'all': send the conversation as the model is to read it")


def _tool(value: Any, name: str) -> dict[str, Any]:
    given = object_of(value, name, (*_TOOL_KEYS, "cache_control", "eager_input_streaming"))
    if given.get("type", "custom") != "custom":
        raise refuse(f"{name}.type", given["type"], "'custom', or left out: tools of the server's own are not offered")
    renamed = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    return {"type": "function", "function": {new: given[old] for old, new in renamed.items() if old in given}}


def _choice(value: Any) -> dict[str, Any]:
    given = object_of(value, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    several = {"parallel_tool_calls": False} if given.get("disable_parallel_tool_use") else {}
    if given.get("type") == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": given.get("name")}}, **several}
    if (choice := _CHOICES.get(str(given.get("type")))) is None:
        raise refuse("tool_choice.type", given.get("type"), "auto, any, none or tool")
    return {"tool_choice": choice, **several}


def _conversation(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    made = Translated()
    if "system" in given:
        made.say("system", take_texts(given["system"], "system", ("text",)))
    for number, value in enumerate(take_list(given["messages"], "messages")):
        name = f"messages[{number}]"
        message = object_of(value, name, ("role", "content"))
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise refuse(f"{name}.role", role, "user or assistant; a system message is the field system")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for index, block in enumerate(blocks):
            _add(made, role, block, f"{name}.content[{index}]")
        made.close()
    return made.messages


def _add(made: Translated, role: str, value: Any, name: str) -> None:
    keys = ("type", "text", "thinking", "id", "name", "input", "tool_use_id", "content", "is_error")
    given = object_of(value, name, (*keys, "cache_control", "signature", "citations"))
    kind = given.get("type")
    if kind == "text":
        made.say(role, text(given.get("text"), f"{name}.text"))
    elif kind == "thinking" and role == "assistant":
        made.think(text(given.get("thinking"), f"{name}.thinking"))
    elif kind == "tool_use" and role == "assistant":
        made.call(given.get("id"), given.get("name"), json.dumps(given.get("input", {})))
    elif kind == "tool_result" and role == "user":
        made.result(given.get("tool_use_id"), take_texts(given.get("content", ""), f"{name}.content", ("text",)))
    elif kind != "redacted_thinking":
        raise refuse(f"{name}.type", kind, "text, or thinking and tool_use of the assistant, tool_result of the user")
