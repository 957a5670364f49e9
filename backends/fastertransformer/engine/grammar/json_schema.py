"""JSON schemas without keywords whose values ask for nothing, which the library would refuse by their names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]


def _is_any(value: Any) -> bool:
    """Return whether a schema allows every value, whatever words it has about it."""
    return value is True or value == {}


def _has_no_branches(schema: Schema) -> bool:
    return _is_any(schema.get("then", True)) and _is_any(schema.get("else", True))


def _are_any(values: Any) -> bool:
    return isinstance(values, dict) and all(each == [] or _is_any(each) for each in values.values())


# Keywords that the library lacks, and whether a schema with one allows what it allows without it.
_NEUTRAL: Mapping[str, Callable[[Any, Schema], bool]] = {
    "uniqueItems": lambda value, schema: value is False or schema.get("maxItems", 2) in (0, 1),
    "unevaluatedItems": lambda value, _: _is_any(value),
    "unevaluatedProperties": lambda value, _: _is_any(value),
    "propertyNames": lambda value, _: _is_any(value),
    "dependentRequired": lambda value, _: _are_any(value),
    "dependentSchemas": lambda value, _: _are_any(value),
    "dependencies": lambda value, _: _are_any(value),
    "not": lambda value, _: value is False,
    "minContains": lambda _, schema: "contains" not in schema,
    "maxContains": lambda _, schema: "contains" not in schema,
    "if": lambda _, schema: _has_no_branches(schema),
    "then": lambda _, schema: "if" not in schema or _has_no_branches(schema),
    "else": lambda _, schema: "if" not in schema or _has_no_branches(schema),
}
# They name a place, for references of their own.
_PLACES = {"$dynamicAnchor": "$dynamicRef", "$recursiveAnchor": "$recursiveRef"}
# Where a schema has schemas: in the value itself, in its elements, in its values.
_ONE = ("additionalProperties", "additionalItems", "items")
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def without_neutral(text: str) -> str:
    """Leave such keywords out; a text that has none, or is no JSON object, stays as it is.

    Raises:
        ValueError: it cannot be read, but has the name of such a keyword.
        RecursionError: it is nested too deeply for Python.
    """
    if text.strip() == "true":
        return "{}"
    places = [place for place, reference in _PLACES.items() if f'"{reference}"' not in text]
    has_counts = '"minContains"' in text and "draft-0" not in text  # older drafts do not have it
    if not any(f'"{name}"' in text for name in (*_NEUTRAL, *places)):
        return text
    schema = json.loads(text)
    has_changed, left = False, [schema]
    while left:
        each = left.pop()
        if not isinstance(each, dict):
            continue
        neutral = [name for name, is_neutral in _NEUTRAL.items() if name in each and is_neutral(each[name], each)]
        if has_counts and each.get("minContains", 1) == 0 and "maxContains" not in each:
            neutral += [name for name in ("contains", "minContains") if name in each and name not in neutral]
        for name in (*neutral, *(place for place in places if place in each)):
            has_changed = True
            del each[name]
        left += [each[name] for name in _ONE if name in each]
        left += [inner for name in _SEVERAL if isinstance(each.get(name), list) for inner in each[name]]
        left += [inner for name in _NAMED if isinstance(each.get(name), dict) for inner in each[name].values()]
    return json.dumps(schema) if has_changed else text
