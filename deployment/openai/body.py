"""Read a request's body by a table of fields."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from deployment.openai.errors import ApiError
from deployment.openai.fields import REFUSED, Field
from deployment.openai.service import RECORD
from handover.errors import nearest, shortened

Values = Mapping[str, Any]
"""Every field of a table by name, checked; what was not given has its default."""

_READ_S = 60.0
"""How long a client may take to send a body."""


async def read_body(request: web.Request, table: Mapping[str, Field]) -> Values:
    """Read and check the body of a request.

    Raises:
        ApiError: it is not JSON, too large or too slow, or a field is unknown or not legal.
    """
    if request.content_type != "application/json":
        raise ApiError(
            f"the body is of type {shortened(request.content_type, 80)}", "send application/json", status=415
        )
    try:
        if request.content.is_eof():  # it came with the headers; waiting for it would take a task of its own
            content = await request.read()
        else:
            content = await asyncio.wait_for(request.read(), _READ_S)
    except (asyncio.TimeoutError, TimeoutError):
        raise ApiError(f"the body did not arrive within {_READ_S:g} s", "send it again", status=408) from None
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError(error.text or "the body is too large", "send fewer prompts at a time", status=413) from None
    request[RECORD].arrived_ns = time.monotonic_ns()  # a client may take its time with the body
    return check_fields(parse(content), table)


def parse(content: bytes) -> Any:
    """Parse JSON that anybody may have written; ApiError: it is none."""
    try:
        return json.loads(content, parse_constant=_refuse_constant)
    except RecursionError:
        raise ApiError("the body is nested too deeply", "it is one object of fields") from None
    except ValueError as error:  # JSON, UTF-8, and numbers of too many digits
        raise ApiError(f"the body is not JSON: {shortened(str(error))}", "it is one object of fields") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


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


_NEUTRAL: tuple[Any, ...] = (None, [], False)
"""Values with which a refused field asks for nothing."""


def _refuse_unknown(name: str, value: Any, table: Mapping[str, Field]) -> None:
    if name in REFUSED:
        if value in _NEUTRAL:
            return
        raise ApiError(f"{name} is not supported", REFUSED[name], param=name, code="unsupported_parameter")
    raise ApiError(
        f"unknown field '{shortened(name, 80)}'", nearest(shortened(name, 80), table), param=shortened(name, 80)
    )


def required(values: Values, name: str) -> Any:
    """Return a field that must be given; ApiError: it is not."""
    if values[name] is None:
        raise ApiError(f"{name} is missing", "this field must be given", param=name)
    return values[name]
