"""The grammar of arguments that are written as literals: what a schema asks for, in that language's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deployment.openai.errors import ApiError
from deployment.openai.tools.declared import Tool
from deployment.openai.tools.literals import Literals, is_bare
from deployment.openai.tools.schemas import expect_known, fields_of

_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": _OF_NUMBERS,
    "number": _OF_NUMBERS,
    "boolean": (),
    "null": (),
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
"""What is honoured of a schema, by its type."""
_ALL_KEYWORDS = tuple(keyword for keywords in _KEYWORDS.values() for keyword in keywords)


class LiteralRules:
    """Writes the rules of one tool's arguments.

    Args:
        literals: of the dialect.
        tool: whose arguments they are.
        name: that the rules' names begin with.
        literal: writes a fixed text, whose special tokens are those.
        text: writes a text of a schema from behind a mark to the next, by a rule of that name.
        json: writes a value of a schema as JSON has it.

    Attributes:
        rules: that ``arguments`` has needed.
    """

    def __init__(
        self,
        literals: Literals,
        tool: Tool,
        name: str,
        literal: Callable[[str], str],
        text: Callable[[str, Mapping[str, Any]], str],
        json: Callable[[Mapping[str, Any]], str],
    ) -> None:
        self.rules = list[str]()
        self._literals, self._tool, self._name = literals, tool, name
        self._literal, self._text, self._json = literal, text, json
        self._referred, self._any_rule, self._count = dict[str, str](), "", 0

    def arguments(self) -> str:
        """Write all arguments, without what is around them.

        Raises:
            ApiError: the tool is strict and cannot be held to its schema, or that cannot be written or followed at all.
        """
        schema = self._tool.schema
        for key, _, _ in fields_of(schema):
            if not is_bare(key):
                raise self._refused(f"has an argument '{key[:80]}'", "this model cannot write such a name")
        expect_known(schema, ("properties", "required", "additionalProperties"), self._tool)
        try:
            return self._fields(schema, lambda key: self._literal(key + self._literals.assign))
        except RecursionError:
            raise self._refused("has a schema that is nested too deeply", "make it flatter") from None

    def _fields(self, schema: Mapping[str, Any], write_key: Callable[[str], str]) -> str:
        """Write keys with their values in a fixed order; those that are not required may be left out."""
        fields = list(fields_of(schema))
        if self._literals.is_sorted:
            fields.sort(key=lambda field: field[0].lower())
        comma, rest, first = self._literal(self._literals.comma), "", list[str]()
        for key, each, is_required in reversed(fields):
            pair = self._rule(f"{write_key(key)} {self._value(each)}")
            first = [f"{pair} {rest}", *([] if is_required else first)]
            more = f"{comma} {pair}"
            rest = self._rule(f"{more if is_required else f'({more})?'} {rest}")
        return f"({' | '.join(first)}){'' if any(field[2] for field in fields) else '?'}" if fields else ""

    def _value(self, schema: Any) -> str:
        """Write a value of a schema, one of the tool's."""
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, Mapping):
            raise self._refused("has a schema that is none", "write an object")
        if "$ref" in schema:
            expect_known(schema, ("$ref",), self._tool)
            return self._reference(schema["$ref"])
        if "const" in schema or "enum" in schema:
            expect_known(schema, ("const", "enum"), self._tool)
            return self._one_of(self._chosen([schema["const"]] if "const" in schema else schema["enum"]))
        for key in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(key)
            if isinstance(branches, list) and (key != "allOf" or len(branches) == 1):
                expect_known(schema, ("anyOf", "allOf"), self._tool)
                base = {name: each for name, each in schema.items() if name != key}
                return self._one_of(
                    self._value({**base, **each} if isinstance(each, dict) else each) for each in branches
                )
        expect_known(schema, _ALL_KEYWORDS, self._tool)
        kinds = schema.get("type") or ("object" if "properties" in schema else "array" if "items" in schema else None)
        listed = kinds if isinstance(kinds, list) else [kinds] if kinds else list(_KEYWORDS)
        return self._one_of(self._of_kind(kind, schema) for kind in listed)

    def _of_kind(self, kind: Any, schema: Mapping[str, Any]) -> str:
        literals = self._literals
        if not isinstance(kind, str) or kind not in _KEYWORDS:
            raise self._refused(f"has a schema of type {json.dumps(kind)[:80]}", f"it is one of {', '.join(_KEYWORDS)}")
        own = {"type": kind} | {key: schema[key] for key in _KEYWORDS[kind] if key in schema}
        if kind == "array":
            return self._array(own)
        if kind == "object":
            return self._object(own)
        if kind == "boolean":
            return f'("{literals.true}" | "{literals.false}")'
        if kind == "null":
            return f'"{literals.null}"'
        if kind == "string" and literals.mark:
            return f"{self._literal(literals.mark)} {self._text(self._next_name(), own)}"
        return self._json(own)

    def _array(self, schema: Mapping[str, Any]) -> str:
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if not all(isinstance(each, int) and each >= 0 for each in (fewest, most or 0)):
            raise self._refused("has lengths of a list that are none", "give whole numbers")
        if most == 0:
            return '"[" "]"'
        item = self._rule(self._value(schema.get("items", {})))
        bounds = f"{{{max(fewest - 1, 0)},{'' if most is None else most - 1}}}"
        several = f"{item} ({self._literal(self._literals.comma)} {item}){bounds}"
        return f'"[" {several} "]"' if fewest else f'"[" ({several})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        literals = self._literals
        more = schema.get("additionalProperties", {})
        if schema.get("properties") or schema.get("required"):
            inner = self._fields(schema, lambda key: self._literal(literals.write_key(key) + literals.colon))
        elif more is False:
            inner = ""
        else:
            key = "/[A-Za-z_][A-Za-z0-9_]{0,63}/" if literals.mark else self._json({"type": "string"})
            pair = self._rule(f"{key} {self._literal(literals.colon)} {self._value(more)}")
            inner = f"({pair} ({self._literal(literals.comma)} {pair})*)?"
        return f'"{{" {inner} "}}"'

    def _any(self) -> str:
        """Write any value, by one rule that calls itself."""
        if not self._any_rule:
            self._any_rule = self._next_name()
            kinds = [self._of_kind(kind, {}) for kind in _KEYWORDS]
            self.rules.append(f"{self._any_rule}: {' | '.join(kinds)}")
        return self._any_rule

    def _reference(self, reference: Any) -> str:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise self._refused(f"refers to {json.dumps(reference)[:80]}", "refer to what the schema itself has")
        if reference not in self._referred:
            found: Any = self._tool.schema
            for key in reference.split("/")[1:]:
                found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            self._referred[reference] = name = self._next_name()
            self.rules.append(f"{name}: {self._value(found)}")
        return self._referred[reference]

    def _chosen(self, listed: Any) -> Iterable[str]:
        """Write each value of a list; a text with the mark in it cannot be written."""
        mark = self._literals.mark
        return (
            self._literal(self._literals.write(each))
            for each in (listed if isinstance(listed, list) else [])
            if not (mark and mark in json.dumps(each, ensure_ascii=False).replace('\\"', '"'))
        )

    def _one_of(self, rules: Iterable[str]) -> str:
        choices = list(rules)
        if not choices:
            raise self._refused("has a schema that no value matches", "give values that can be written")
        return f"({' | '.join(choices)})" if len(choices) > 1 else choices[0]

    def _rule(self, expression: str) -> str:
        name = self._next_name()
        self.rules.append(f"{name}: {expression}")
        return name

    def _next_name(self) -> str:
        self._count += 1
        return f"{self._name}_{self._count}"

    def _refused(self, what: str, next_: str) -> ApiError:
        return ApiError(f"tool '{self._tool.name}' {what}", next_, param="tools")
