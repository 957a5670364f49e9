"""Take in a request: its body off the connection, then what it asks, read in this process or in another."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from aiohttp import http_exceptions, web

from deployment.openai.bodies.body import Values, parse
from deployment.openai.errors import ApiError
from deployment.openai.service import RECORD, Service, service_of
from deployment.openai.texts.offered_models import Model
from deployment.openai.texts.preparing import KINDS, Prompt, check, decompress
from handover.errors import shortened

ENCODINGS = ("gzip", "deflate", "br")
_READ_S = 60.0
"""How long a client may take to send a body."""
_PART = 1 << 18
_SHORT_BODY, _SHORT_TEXT, _FEW_TOKENS = 1 << 15, 2048, 1024
"""Bytes of a body, characters of its texts and tokens that are to become texts, up to which the event loop does the
work: another process takes as long to be asked."""


class Body(NamedTuple):
    """The bytes of a body, and how they are compressed; empty: not at all."""

    content: bytes
    encoding: str = ""


async def read_body(request: web.Request) -> Body:
    """Receive the body of a request.

    Raises:
        ApiError: it is not JSON's type, too large, too slow, or not what its headers say.
    """
    encoding = request.headers.get("Content-Encoding", "").strip().lower().replace("x-gzip", "gzip")
    if encoding not in ("", "identity", *ENCODINGS):
        raise ApiError(
            f"the body's Content-Encoding is {shortened(encoding, 80)}",
            f"it is one of {', '.join(ENCODINGS)}, or left out",
            status=415,
        )
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
    except (http_exceptions.HttpProcessingError, web.RequestPayloadError):
        raise ApiError(
            "the body is not what Content-Length or Transfer-Encoding say", "send the headers that belong to it"
        ) from None
    request[RECORD].arrived_ns = time.monotonic_ns()  # a client may take its time with the body
    return Body(content, encoding.replace("identity", ""))


async def read_json(request: web.Request) -> Any:
    """Read the body of a request; ApiError: it is no JSON."""
    body = await read_body(request)
    content = decompress(body.content, body.encoding, service_of(request).limits.most_bytes)
    return parse(content)


async def read_asked(
    service: Service, name: str, body: Body
) -> tuple[Values, Model, tuple[Prompt, ...] | bytes | memoryview]:
    """Read what a body asks, without holding up other requests.

    Args:
        service: that is asked.
        name: of the path's kind, a key of ``KINDS``.
        body: of the request.

    Returns:
        The checked fields, the model, and the prompts as tokens or the whole answer.

    Raises:
        ApiError: the request is refused.
    """
    kind, models = KINDS[name], service.models
    if len(body.content) <= _SHORT_BODY and kind.has_text_alone and not body.encoding:
        values, model = check(kind, body.content, models, service.limits.most_answers)
        if _is_short(values):
            model = await service.adapters.resolve(model, values["model"], models)
            return values, model, kind.work(model, values)
    values, engine, done = await service.texts.read(name, *body)
    return values, await service.adapters.resolve(models.find(engine), values["model"], models), done


async def send_json(request: web.Request, content: bytes | memoryview) -> web.StreamResponse:
    """Answer with JSON of any length; as a whole it would be copied more than once before anything else is done."""
    if len(content) <= _PART:
        return web.Response(body=bytes(content), content_type="application/json", charset="utf-8")
    response = web.StreamResponse()
    response.content_type, response.charset, response.content_length = "application/json", "utf-8", len(content)
    await response.prepare(request)
    view = memoryview(content)
    for first in range(0, len(view), _PART):
        await response.write(bytes(view[first : first + _PART]))
    await response.write_eof()
    return response


def _is_short(values: Values) -> bool:
    given = values.get("prompt")
    texts = [given] if isinstance(given, str) else [each for each in given or () if isinstance(each, str)]
    is_conversation = values.get("messages") is not None
    return (
        not is_conversation and sum(map(len, texts)) <= _SHORT_TEXT and len(values.get("tokens") or ()) <= _FEW_TOKENS
    )
