"""Conversations of other APIs as messages of chat completions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from deployment.openai.values import object_of, refuse, text


class Translated:
    """Messages, put together of texts, thoughts, calls and results in their order.

    Attributes:
        messages: of chat completions.
    """

    def __init__(self) -> None:
        self.messages = list[dict[str, Any]]()
        self._is_open = False  # the last message takes more

    def say(self, role: str, said: str) -> None:
        """Add a text to the message that is open, if it is the same speaker's, or to a new one."""
        message = self._message(role)
        message["content"] = said if message["content"] is None else f"{message['content']}\n{said}"

    def think(self, thought: str) -> None:
        """Add what the assistant has thought."""
        message = self._message("assistant")
        message["reasoning_content"] = message.get("reasoning_content", "") + thought

    def call(self, identity: Any, name: Any, arguments: Any) -> None:
        """Add a call of the assistant's."""
        call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._message("assistant").setdefault("tool_calls", []).append(call)

    def result(self, identity: Any, result: str) -> None:
        """Add what a call has returned."""
        self.close()
        self.messages.append({"role": "tool", "tool_call_id": identity, "content": result})

    def close(self) -> None:
        """End the message that is open."""
        self._is_open = False

    def _message(self, role: str) -> dict[str, Any]:
        if not (self._is_open and self.messages and self.messages[-1]["role"] == role):
            self.messages.append({"role": role, "content": None})
            self._is_open = True
        return self.messages[-1]


def take_list(value: Any, name: str) -> list[Any]:
    """Take a list."""
    if not isinstance(value, list):
        raise refuse(name, value, "a list")
    return value


def take_texts(value: Any, name: str, kinds: Collection[str]) -> str:
    """Take a text, or a list of parts of text of some kinds, which become lines."""
    if not isinstance(value, list):
        return text(value, name)
    found = list[str]()
    for index, each in enumerate(value):
        part = object_of(each, f"{name}[{index}]", ("type", "text", "cache_control", "annotations", "logprobs"))
        if part.get("type") not in kinds:
            raise refuse(f"{name}[{index}].type", part.get("type"), f"{' or '.join(kinds)}: models take text alone")
        found.append(text(part.get("text"), f"{name}[{index}].text"))
    return "\n".join(found)
