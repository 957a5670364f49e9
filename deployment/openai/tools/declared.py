"""The tools of a request, and which of them its answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployment.openai.errors import ApiError
from deployment.openai.values import boolean, checked_texts, object_of, refuse, text

_MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_OPEN = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties", "$ref")
    + ("allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependentRequired", "dependencies")
)
"""What says of a schema whether, or which, other properties there are."""
NONE, AUTO, REQUIRED, NAMED = "none", "auto", "required", "function"
Choice = tuple[str, str]
"""What an answer does with the tools: one of these four, and the name of a function, which is empty but for NAMED."""


@dataclass(frozen=True)
class Tool:
    """A function that the client runs.

    Attributes:
        name: of it.
        schema: JSON schema of its arguments, which are an object.
        is_strict: whether a schema that a grammar cannot express is refused; else what it can express is kept to.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool


@dataclass(frozen=True)
class Offered:
    """The tools that an answer may call, at least one, and how.

    Attributes:
        tools: in the order in which they are declared.
        must_call: whether the answer is calls alone.
        has_several: whether it may be several calls.
        is_named: whether the client has named the function.
    """

    tools: tuple[Tool, ...]
    must_call: bool
    has_several: bool
    is_named: bool


def read_tools(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Take the list of tools, in the form in which a chat template is given them."""
    if not isinstance(value, list) or len(value) > _MOST_TOOLS:
        raise refuse(name, value, f"a list of at most {_MOST_TOOLS} tools")
    tools = tuple(_tool(each, f"{name}[{index}]") for index, each in enumerate(value))
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((each for index, each in enumerate(names) if each in names[:index]), None):
        raise ApiError(f"{name} has two functions called '{twice}'", "give each a name of its own", param=name)
    return tools


def _tool(value: Any, name: str) -> dict[str, Any]:
    given = object_of(value, name, ("type", "function"))
    if given.get("type", "function") != "function":
        raise refuse(f"{name}.type", given["type"], "'function': tools of other types are not offered")
    inner = object_of(
        given.get("function"), f"{name}.function", ("name", "description", "parameters", "strict", "return")
    )
    called = inner.get("name")
    if not isinstance(called, str) or not _NAME.fullmatch(called):
        raise refuse(f"{name}.function.name", called, "1 to 128 letters, digits and _ . : / -")
    _check_schema(inner.get("parameters"), f"{name}.function.parameters")
    boolean(inner.get("strict", False), f"{name}.function.strict")
    text(inner.get("description", ""), f"{name}.function.description")
    return {"type": "function", "function": dict(checked_texts(inner, f"{name}.function"))}


def _check_schema(schema: Any, name: str) -> None:
    """Refuse what is no schema of an object, as far as this package reads it; the engine's grammars read the rest."""
    if schema is None:
        return
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise refuse(name, schema, "a JSON schema of an object")
    for key, kind, legal in (("properties", dict, "an object of schemas"), ("required", list, "a list of names")):
        if not isinstance(schema.get(key, kind()), kind):
            raise refuse(f"{name}.{key}", schema[key], legal)


def read_choice(value: Any, name: str) -> Choice:
    """Take what the answer may or must call."""
    if isinstance(value, dict):
        given = object_of(value, name, ("type", "function"))
        if given.get("type") != NAMED:
            raise refuse(f"{name}.type", given.get("type"), f"'{NAMED}'")
        inner = object_of(given.get("function"), f"{name}.function", ("name",))
        return NAMED, text(inner.get("name"), f"{name}.function.name")
    if value not in (NONE, AUTO, REQUIRED):
        raise refuse(name, value, f"'{NONE}', '{AUTO}', '{REQUIRED}', or an object that names a function")
    return value, ""


def offered(declared: Sequence[Mapping[str, Any]] | None, choice: Choice | None, has_several: bool) -> Offered | None:
    """Return the tools that an answer may call; None: it may call none.

    Args:
        declared: see read_tools; None: none.
        choice: of the client; None: it has left it to the model.
        has_several: whether an answer may be several calls.

    Raises:
        ApiError: a call is asked for, and there is no such tool.
    """
    tools, (kind, wanted) = tuple(map(_read, declared or ())), choice or (AUTO, "")
    if kind == NAMED:
        names = [tool.name for tool in tools]
        tools = tuple(tool for tool in tools if tool.name == wanted)
        if not tools:
            known = f"it is one of {', '.join(names)}" if names else "declare it in tools"
            raise ApiError(f"tool_choice names '{wanted[:128]}', which is no tool", known, param="tool_choice")
    if kind == REQUIRED and not tools:
        raise ApiError("tool_choice asks for a call, and there are no tools", "declare tools", param="tool_choice")
    if not tools or kind == NONE:
        return None
    return Offered(tools, kind in (REQUIRED, NAMED), has_several and kind != NAMED, kind == NAMED)


def _read(declared: Mapping[str, Any]) -> Tool:
    function = declared["function"]
    schema = function.get("parameters") or _NO_ARGUMENTS
    return Tool(function["name"], {**schema, "type": "object", **_closing(schema)}, bool(function.get("strict")))


def _closing(schema: Mapping[str, Any]) -> dict[str, bool]:
    """Return what keeps a model to the arguments that are declared, where the schema leaves others open."""
    declared = list(schema.get("properties") or ())
    is_plain = declared and all(key in declared for key in schema.get("required") or ())
    return {"additionalProperties": False} if is_plain and schema.keys().isdisjoint(_OPEN) else {}
