"""The way of every request for answers: checked, admitted, planned, answered whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from aiohttp import web

from deployment.openai.answers.answering import Plan, answer_stream, answer_whole
from deployment.openai.answers.reading import read_asked, read_body, send_json
from deployment.openai.bodies.body import Values
from deployment.openai.engine.tensors import check_offered
from deployment.openai.errors import ApiError
from deployment.openai.service import RECORD, service_of
from deployment.openai.texts.offered_models import Model
from deployment.openai.texts.preparing import KINDS, Prompt

Planner = Callable[[web.Request, Values, Model, Sequence[Prompt]], Generator[None, None, Plan]]


async def respond(request: web.Request, name: str, plan_of: Planner) -> web.StreamResponse:
    """Answer a request.

    Args:
        request: of the client.
        name: of the path's kind, a key of ``KINDS``.
        plan_of: plans the answers to what the body asks, in turns.

    Raises:
        ApiError: the request is refused, or the server failed on it.
    """
    service, record = service_of(request), request[RECORD]
    body = await read_body(request)
    with service.admitted():
        values, model, prompts = await read_asked(service, name, body)
        assert isinstance(prompts, tuple)
        record.model = model.names[0]
        check_offered(values, KINDS[name].table, model)
        _check_combinations(values)
        plan = await service.turns.run(plan_of(request, values, model, prompts))
        if values["stream"]:
            response, record.usage = await answer_stream(request, service, plan)
            return response
        written, record.usage = await answer_whole(service, plan)
    return await send_json(request, written)


def _check_combinations(values: Values) -> None:
    """Refuse what makes no sense together; ApiError."""
    if values["stream_options"] and not values["stream"]:
        raise ApiError("stream_options.include_usage is for streams", "give stream: true", param="stream_options")
    if values["beam_width"] > 1 and (values["stream"] or values["n"] > 1):
        raise ApiError(
            "the best beam is known when all are complete, and it is the one answer",
            "leave stream and n out, or beam_width",
            param="beam_width",
        )
