"""What an answer must follow: OpenAI's and vLLM's fields for it, as a type and a text for the engine's tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from deployment.openai.errors import ApiError
from deployment.openai.values import boolean, object_of, refuse, text

Guide = tuple[str, str]
"""The values of guided_decoding_guide_type and guided_decoding_guide."""

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
OF_TOOLS = "guide of tools"
"""Where a conversation's plan puts the guide that its tools make, among the values of fields."""
_ANY_OBJECT: Guide = ("json_schema", '{"type": "object"}')
_MOST_CHOICES = 10_000


def response_format(value: Any, name: str) -> Guide | None:
    """Take OpenAI's field; None: any text."""
    given = object_of(value, name, ("type", "json_schema"))
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    if kind != "json_schema":
        raise refuse(f"{name}.type", kind, "text, json_object or json_schema")
    inner = object_of(given.get("json_schema"), f"{name}.json_schema", ("name", "description", "schema", "strict"))
    return json_schema(inner.get("schema"), f"{name}.json_schema.schema")


def json_schema(value: Any, name: str) -> Guide:
    """Take a JSON schema, or its text."""
    if isinstance(value, str):
        return "json_schema", text(value, name)
    if not isinstance(value, dict):
        raise refuse(name, value, "a JSON schema: an object, or its text")
    return "json_schema", _written(value, name)


def regex(value: Any, name: str) -> Guide:
    """Take a regular expression."""
    return "regex", _some_text(value, name)


def grammar(value: Any, name: str) -> Guide:
    """Take a grammar, in GBNF or in Lark's form."""
    return "ebnf_grammar", _some_text(value, name)


def choice(value: Any, name: str) -> Guide:
    """Take the texts of which the answer is one."""
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_CHOICES:
        raise refuse(name, value, f"a list of 1 to {_MOST_CHOICES} texts")
    return "choice", _written([text(each, f"{name}[{index}]") for index, each in enumerate(value)], name)


def _json_object(value: Any, name: str) -> Guide | None:
    return _ANY_OBJECT if boolean(value, name) else None


_KINDS: Mapping[str, Callable[[Any, str], Guide | None]] = {
    "json": json_schema,
    "json_object": _json_object,
    "regex": regex,
    "choice": choice,
    "grammar": grammar,
}


def structured_outputs(value: Any, name: str) -> Guide | None:
    """Take vLLM's object, which has one of several keys."""
    given = object_of(value, name, tuple(_KINDS))
    found = {key: guide for key, each in given.items() if (guide := _KINDS[key](each, f"{name}.{key}"))}
    if len(found) > 1:
        raise ApiError(f"{name} has {' and '.join(found)}", "give one of them", param=name)
    return next(iter(found.values()), None)


def guide_of(values: Mapping[str, Any]) -> Guide | None:
    """Return the guide of a request; None: it has none.

    Raises:
        ApiError: it has several, or asks for what cannot follow one.
    """
    given = [name for name in FIELDS if values[name]]
    given += ["tools"] if values.get(OF_TOOLS) else []
    if not given:
        return None
    if len(given) > 1:
        raise ApiError(f"{' and '.join(given)} exclude each other", "give one of them", param=given[1])
    if values["ignore_eos"] or values["beam_width"] > 1:
        other = "ignore_eos" if values["ignore_eos"] else "beam_width"
        raise ApiError(f"{given[0]} and {other} exclude each other", "give one of them", param=other)
    guide: Guide = values[OF_TOOLS if given[0] == "tools" else given[0]]
    return guide


def _some_text(value: Any, name: str) -> str:
    if value == "":
        raise refuse(name, value, "a text that is not empty")
    return text(value, name)


def _written(value: Any, name: str) -> str:
    """Write JSON as UTF-8 can express it; ApiError: it is nested too deeply."""
    try:
        return json.dumps(value)
    except RecursionError:
        raise ApiError(f"{name} is nested too deeply", "give it a flatter form", param=name) from None
