"""Schemas of arguments, as far as a grammar of our own must read them: where values are not written as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from deployment.openai.errors import ApiError
from deployment.openai.tools.declared import Tool

ANY_TEXT = r"/(.|\n)*/"
_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id")
    + ("$defs", "definitions", "type", "nullable")
)
_PARTS = re.compile(r"\\.|\[\^|\(\?:?|[\^$]", re.DOTALL)
_CLASSES = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]", r"\s": r"[ \t\n\r]"}
_INEXPRESSIBLE = frozenset("bBDSWpPuxck123456789")
"""Of ECMA's expressions, which schemas have; the library's are those of all scripts."""


def fields_of(schema: Mapping[str, Any]) -> Iterable[tuple[str, Any, bool]]:
    """Return an object's keys in order, each with its schema and whether it is required; ApiError: it has none."""
    declared, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(declared, Mapping) or not isinstance(required, list):
        raise ApiError("a tool has a schema whose properties or required are none", "see JSON Schema", param="tools")
    names = [*declared, *(key for key in required if isinstance(key, str) and key not in declared)]
    return [(key, declared.get(key, {}), key in required) for key in names]


def expect_known(schema: Mapping[str, Any], known: Iterable[str], tool: Tool) -> None:
    """Refuse keywords that the grammar does not express, if the tool is strict; ApiError."""
    for key in schema if tool.is_strict else ():
        if key not in _NOTES and key not in known:
            raise ApiError(
                f"tool '{tool.name}' is strict and has a schema with '{key[:80]}'",
                "this model's calls cannot be held to it: leave it out, or strict",
                param="tools",
            )


def text_terminal(schema: Mapping[str, Any], end: str, tool: Tool) -> str:
    """Write what a text of a schema may be, as an expression of terminals: without its end, of its length and pattern.

    Raises:
        ApiError: the tool is strict, and something else is asked of the text.
    """
    expect_known(schema, ("minLength", "maxLength", "pattern", "enum", "const"), tool)
    parts = [ANY_TEXT, f"~/(.|\\n)*{escaped(end)}(.|\\n)*/"]
    fewest, most = schema.get("minLength", 0), schema.get("maxLength")
    if fewest or most is not None:
        if not all(isinstance(each, int) and each >= 0 for each in (fewest, most or 0)):
            raise ApiError(f"tool '{tool.name}' has lengths of a text that are none", param="tools")
        parts.append(f"/(.|\\n){{{fewest},{'' if most is None else most}}}/")
    if "pattern" in schema:
        parts += _matched(schema["pattern"], tool)
    return " & ".join(parts)


def escaped(text: str) -> str:
    """Write a text as a part of an expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", "\\n")


def _matched(pattern: Any, tool: Tool) -> list[str]:
    """Write a pattern, which may match anywhere, as one of the whole text; nothing where that cannot be."""
    inner = pattern.removeprefix("^").removesuffix("$") if isinstance(pattern, str) else "$"
    parts = _PARTS.findall(inner)
    is_odd = any(part in ("^", "$", "(?") or part[0] == "\\" and part[1:] in _INEXPRESSIBLE for part in parts)
    if is_odd or (inner != pattern and "|" in inner) or inner.endswith("\\"):
        expect_known({"pattern": pattern}, (), tool)
        return []
    inner = _PARTS.sub(lambda found: _CLASSES.get(found[0], found[0]), inner.replace(r"\/", "/")).replace("/", r"\/")
    before, after = ("" if pattern.startswith("^") else r"(.|\n)*"), ("" if pattern.endswith("$") else r"(.|\n)*")
    return [f"/{before}({inner}){after}/"]
