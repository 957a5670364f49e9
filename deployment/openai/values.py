"""Check one value of a body: its type and its range, with the field's name in what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deployment.openai.errors import ApiError
from handover.errors import nearest, shortened
from handover.ranges import TOKEN_ID
from models.checks import Range

Prompt = str | tuple[int, ...]
"""A text, or token ids."""

_JSON = json.JSONEncoder(ensure_ascii=False)
_MOST_SHOWN = 80
_MOST_STOPS = 64
_BIAS = Range(-100, 100)
_MOST_BIASES = 1024
_ROLES = ("system", "developer", "user", "assistant", "tool")
_OF_ASSISTANT = ("tool_calls", "reasoning_content", "reasoning")
_OF_ROLES = {"assistant": _OF_ASSISTANT, "tool": ("tool_call_id",)}
_MOST_CALLS = 128


def refuse(name: str, value: Any, legal: str) -> ApiError:
    """Make the error for a value that is not legal: the field, what it is, and what it may be."""
    return ApiError(f"{name} is {_shown(value)}", f"it is {legal}", param=name)


def _shown(value: Any) -> str:
    """Quote the beginning of a value, which may be of any size."""
    if isinstance(value, str):
        rest = f"... ({len(value)} characters)" if len(value) > _MOST_SHOWN else ""
        return json.dumps(value[:_MOST_SHOWN], ensure_ascii=False) + rest
    shown = ""
    try:
        for part in _JSON.iterencode(value):  # part by part, so that no more is written than is shown
            shown += part
            if len(shown) > _MOST_SHOWN:
                return f"{shown[:_MOST_SHOWN]}..."
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return shown


def text(value: Any, name: str) -> str:
    """Take a text that UTF-8 can express."""
    if not isinstance(value, str):
        raise refuse(name, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            f"{name} has half a character, a lone surrogate, at position {error.start}",
            "write each character as UTF-8, or as both of its \\u escapes",
            param=name,
        ) from None
    return value


def boolean(value: Any, name: str) -> bool:
    """Take true or false."""
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value


def integer(allowed: Range) -> Callable[[Any, str], int]:
    """Make a reader of whole numbers in a range; 1.0 is one too."""

    def read(value: Any, name: str) -> int:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value not in allowed or value != int(value):
            raise refuse(name, value, f"a whole number, {allowed}")
        return int(value)

    return read


def number(allowed: Range) -> Callable[[Any, str], float]:
    """Make a reader of numbers in a range."""

    def read(value: Any, name: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or value not in allowed:
            raise refuse(name, value, f"a number, {allowed}")
        return float(value)

    return read


def top_candidates(allowed: Range) -> Callable[[Any, str], int | None]:
    """Make a reader of a number of alternatives; false, which some clients send, is none."""

    def read(value: Any, name: str) -> int | None:
        return None if value is False else integer(allowed)(value, name)

    return read


def stop_words(value: Any, name: str) -> tuple[str, ...]:
    """Take one text or some, none of them empty."""
    words = [value] if isinstance(value, str) else value
    legal = f"a text, or a list of at most {_MOST_STOPS} texts, none of them empty"
    if not isinstance(words, list) or len(words) > _MOST_STOPS or not all(words):
        raise refuse(name, value, legal)
    return tuple(text(word, name) for word in words)


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Take a list of token ids; whether the vocabulary has them is checked where the model is known."""
    if not isinstance(value, list):
        raise refuse(name, value, "a list of token ids")
    if set(map(type, value)) - {int} or not all(each(value) in TOKEN_ID for each in (min, max) if value):
        wrong = next(each for each in value if type(each) is not int or each not in TOKEN_ID)
        raise refuse(f"a token id in {name}", wrong, f"a whole number, {TOKEN_ID}")
    return tuple(value)


def prompts(value: Any, name: str) -> tuple[Prompt, ...]:
    """Take a text, token ids, or a list of either."""
    if isinstance(value, str):
        return (text(value, name),)
    if not isinstance(value, list) or not value:
        raise refuse(name, value, "a text, a list of texts, a list of token ids, or a list of such lists; not empty")
    if type(value[0]) is int:
        return (token_ids(value, name),)
    read: Callable[[Any, str], Prompt] = text if isinstance(value[0], str) else token_ids
    found = tuple(read(each, name) for each in value)
    if () in found:
        raise refuse(name, value, "without empty lists of token ids")
    return found


def token_biases(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    """Take an object of token ids, which JSON writes as texts, to numbers."""
    if not isinstance(value, dict) or len(value) > _MOST_BIASES:
        raise refuse(name, value, f"an object of at most {_MOST_BIASES} token ids")
    read, biases = number(_BIAS), []
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) in TOKEN_ID):
            raise refuse(f"a key of {name}", token, f"a token id, {TOKEN_ID}")
        biases.append((int(token), read(bias, f"{name}[{token}]")))
    return tuple(biases)


def stream_options(value: Any, name: str) -> bool:
    """Take the options of a stream; returns whether it ends with the usage."""
    given = object_of(value, name, ("include_usage",))
    return boolean(given.get("include_usage") or False, f"{name}.include_usage")


def messages(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Take a conversation: roles and texts, as a chat template reads them."""
    if not isinstance(value, list) or not value:
        raise refuse(name, value, "a list of messages, at least one")
    return tuple(_message(each, f"{name}[{index}]") for index, each in enumerate(value))


def _message(value: Any, name: str) -> dict[str, Any]:
    role = value.get("role") if isinstance(value, dict) else None
    given = object_of(value, name, ("role", "content", "name", *_OF_ROLES.get(str(role), ())))
    if role not in _ROLES:
        raise refuse(f"{name}.role", role, f"one of {', '.join(_ROLES)}")
    has_no_content = given.get("content") is None and any(given.get(key) for key in _OF_ASSISTANT)
    made = {"role": role, "content": None if has_no_content else _content(given.get("content"), f"{name}.content")}
    made |= {key: text(given[key], f"{name}.{key}") for key in ("name", "tool_call_id") if key in given}
    thoughts = given.get("reasoning_content", given.get("reasoning"))
    if thoughts is not None:
        made["reasoning_content"] = text(thoughts, f"{name}.reasoning_content")
    if given.get("tool_calls"):
        made["tool_calls"] = _calls(given["tool_calls"], f"{name}.tool_calls")
    return made


def _calls(value: Any, name: str) -> list[dict[str, Any]]:
    """Take the calls of an earlier answer; arguments that are a JSON object become one, as transformers gives them."""
    if not isinstance(value, list) or len(value) > _MOST_CALLS:
        raise refuse(name, value, f"a list of at most {_MOST_CALLS} calls")
    return [_call(each, f"{name}[{index}]") for index, each in enumerate(value)]


def _call(value: Any, name: str) -> dict[str, Any]:
    given = object_of(value, name, ("id", "type", "function", "index"))
    if given.get("type", "function") != "function":
        raise refuse(f"{name}.type", given["type"], "'function'")
    inner = object_of(given.get("function"), f"{name}.function", ("name", "arguments"))
    called = text(inner.get("name"), f"{name}.function.name")
    written = text(inner.get("arguments", "{}"), f"{name}.function.arguments")
    arguments: Any = written
    with contextlib.suppress(ValueError, RecursionError):  # an answer may have been cut off
        arguments = found if isinstance(found := json.loads(written), dict) else written
    identity = {"id": text(given["id"], f"{name}.id")} if "id" in given else {}
    return {**identity, "type": "function", "function": {"name": called, "arguments": arguments}}


def documents(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Take the documents that a chat template may write: objects."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise refuse(name, value, "a list of objects")
    return tuple(checked_texts(value, name))


def template_values(value: Any, name: str) -> dict[str, Any]:
    """Take further values for a chat template by their names."""
    if not isinstance(value, dict):
        raise refuse(name, value, "an object")
    return dict(checked_texts(value, name))


def checked_texts(value: Any, name: str) -> Any:
    """Take any value of JSON whose texts and keys UTF-8 can express."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            text(each, f"a text in {name}")
        elif isinstance(each, dict):
            left += [*each, *each.values()]
        elif isinstance(each, list):
            left += each
    return value


def _content(value: Any, name: str) -> str | list[dict[str, str]]:
    """Take a text, or parts of text; the chat template decides which of the two it is given."""
    if not isinstance(value, list):
        return text(value, name)
    keys = ("type", "text", "cache_control")  # prefixes are cached without being told to
    parts = [object_of(part, f"{name}[{index}]", keys) for index, part in enumerate(value)]
    for index, part in enumerate(parts):
        if part.get("type") != "text":
            raise refuse(f"{name}[{index}].type", part.get("type"), "'text': the models take nothing else")
    return [
        {"type": "text", "text": text(part.get("text"), f"{name}[{index}].text")} for index, part in enumerate(parts)
    ]


def asks_for_nothing(value: Any) -> bool:
    """Return whether a value is as if its key were left out: null, and what clients write where they want nothing."""
    return value is None or value is False or (isinstance(value, list | dict) and not value)


def object_of(value: Any, name: str, legal: Sequence[str]) -> Mapping[str, Any]:
    """Take an object of known keys; null is the same as leaving a key out, and other keys may ask for nothing."""
    if not isinstance(value, dict):
        raise refuse(name, value, f"an object with {', '.join(legal)}")
    for key in value.keys() - set(legal):
        if not asks_for_nothing(value[key]):
            raise ApiError(f"{name} has an unknown key {_shown(key)}", nearest(shortened(key, 80), legal), param=name)
    return {key: each for key, each in value.items() if key in legal and each is not None}
