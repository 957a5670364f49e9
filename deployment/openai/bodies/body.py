"""Check a request's body by a table of fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isinf
from typing import Any

from deployment.openai.bodies.fields import NEUTRAL, REFUSED, Field
from deployment.openai.errors import ApiError
from deployment.openai.values import asks_for_nothing
from handover.errors import nearest, shortened

Values = Mapping[str, Any]
"""Every field of a table by name, checked; what was not given has its default."""


def parse(content: bytes) -> Any:
    """Parse JSON that anybody may have written; ApiError: it is none."""
    try:
        return json.loads(content, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_object)
    except RecursionError:
        raise ApiError("the body is nested too deeply", "it is one object of fields") from None
    except ValueError as error:  # JSON, UTF-8, and numbers of too many digits
        raise ApiError(f"the body is not JSON: {shortened(str(error))}", "it is one object of fields") from None


def _finite(digits: str) -> float:
    """Read a number; one that is larger than any would be written back as what is no JSON."""
    found = float(digits)
    if isinf(found):
        raise ValueError(f"{shortened(digits, 80)} is beyond all numbers that are read")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its keys, each of which stands once: which of two counts, readers of JSON do not agree."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shortened(json.dumps(twice), 80)} stands twice in an object")
    return made


def check_fields(body: Any, table: Mapping[str, Field]) -> Values:
    """Check a body against its table; null is the same as leaving a field out.

    Raises:
        ApiError: a field is unknown or refused, or a value has another type or is out of range.
    """
    if not isinstance(body, dict):
        raise ApiError(f"the body is a JSON {type(body).__name__}", "it is one object of fields")
    values: dict[str, Any] = {name: field.default for name, field in table.items()}
    for name, value in body.items():
        if name not in table:
            _refuse_unknown(name, value, table)
        elif value is not None:
            values[name] = table[name].read(value, name)
    return values


def _refuse_unknown(name: str, value: Any, table: Mapping[str, Field]) -> None:
    if name in REFUSED:
        if asks_for_nothing(value) or any(
            type(value) is type(each) and value == each for each in NEUTRAL.get(name, ())
        ):
            return
        raise ApiError(f"{name} is not supported", REFUSED[name], param=name, code="unsupported_parameter")
    if value is None:
        return
    raise ApiError(
        f"unknown field '{shortened(name, 80)}'", nearest(shortened(name, 80), table), param=shortened(name, 80)
    )


def required(values: Values, name: str) -> Any:
    """Return a field that must be given; ApiError: it is not."""
    if values[name] is None:
        raise ApiError(f"{name} is missing", "this field must be given", param=name)
    return values[name]
