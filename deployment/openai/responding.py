"""The way of every request for answers: checked, admitted, planned, answered whole or as a stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from deployment.openai.answering import Plan, answer_stream, answer_whole
from deployment.openai.body import Values, read_body
from deployment.openai.errors import ApiError
from deployment.openai.fields import Field
from deployment.openai.models import Model
from deployment.openai.service import RECORD, service_of
from deployment.openai.tensors import check_offered

Planner = Callable[[web.Request, Values, Model], Awaitable[Plan]]


async def respond(request: web.Request, table: Mapping[str, Field], plan_of: Planner) -> web.StreamResponse:
    """Answer a request.

    Args:
        request: of the client.
        table: the fields of its body.
        plan_of: plans the answers to what the body asks.

    Raises:
        ApiError: the request is refused, or the server failed on it.
    """
    service, record = service_of(request), request[RECORD]
    values = await read_body(request, table)
    model = service.models.find(values["model"])
    record.model = model.names[0]
    check_offered(values, table, model)
    _check_combinations(values)
    with service.admitted():
        plan = await plan_of(request, values, model)
        if len(plan.requests) > service.arguments.max_sequences:
            raise ApiError(
                f"the request asks for {len(plan.requests)} answers",
                f"one request has at most {service.arguments.max_sequences}: prompts times n",
                param="n",
            )
        if values["stream"]:
            response, record.usage = await answer_stream(request, service.triton, plan)
            return response
        answer = await answer_whole(service.triton, plan)
    record.usage = answer["usage"]
    return web.json_response(answer)


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
