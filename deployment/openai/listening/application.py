"""The application: routes, and what surrounds every handler."""

from __future__ import annotations

import logging
from contextlib import nullcontext

from aiohttp import web
from aiohttp.typedefs import Middleware

from deployment.openai.agents.messages import count_tokens, messages
from deployment.openai.agents.responses import responses
from deployment.openai.answers.adapting import LOAD_PATH, UNLOAD_PATH, load_adapter, unload_adapter
from deployment.openai.answers.chat import chat
from deployment.openai.answers.completions import complete
from deployment.openai.answers.listing import (
    detokenize,
    health,
    list_models,
    metrics,
    show_model,
    tokenize,
    tokenizer_info,
    version,
)
from deployment.openai.errors import ApiError
from deployment.openai.listening.access import AccessLog, Handler, check_key
from deployment.openai.listening.connections import Connection
from deployment.openai.service import RECORD, REQUEST_ID, SERVICE, Service, begin_record

_LOG = logging.getLogger(__name__)


def build_application(service: Service) -> web.Application:
    """Make the application around a service."""
    application = web.Application(
        middlewares=[_noting(AccessLog(service.arguments.access_log)), _worded, _authorised],
        client_max_size=service.arguments.max_body_bytes,
    )
    application[SERVICE] = service
    application.on_response_prepare.append(_send_id)
    application.on_cleanup.append(_end_processes)
    application.router.add_post("/v1/completions", complete)
    application.router.add_post("/v1/chat/completions", chat)
    application.router.add_post("/v1/responses", responses)
    application.router.add_post("/v1/messages", messages)
    application.router.add_post("/v1/messages/count_tokens", count_tokens)
    application.router.add_post(LOAD_PATH, load_adapter)
    application.router.add_post(UNLOAD_PATH, unload_adapter)
    application.router.add_get("/v1/models", list_models)
    application.router.add_get("/v1/models/{id:.+}", show_model)
    application.router.add_post("/tokenize", tokenize)
    application.router.add_post("/detokenize", detokenize)
    application.router.add_get("/tokenizer_info", tokenizer_info)
    application.router.add_get("/health", health)
    application.router.add_get("/metrics", metrics)
    application.router.add_get("/version", version)
    return application


def _noting(log: AccessLog) -> Middleware:
    @web.middleware
    async def noted(request: web.Request, handler: Handler) -> web.StreamResponse:
        begin_record(request)
        connection = request.protocol
        with connection.answering(request) if isinstance(connection, Connection) else nullcontext():
            return await log.answer(request, handler)

    return noted


async def _end_processes(application: web.Application) -> None:
    await application[SERVICE].texts.close()


async def _send_id(request: web.Request, response: web.StreamResponse) -> None:
    if RECORD in request:
        response.headers[REQUEST_ID] = request[RECORD].id
        request[RECORD].has_begun = True


@web.middleware
async def _authorised(request: web.Request, handler: Handler) -> web.StreamResponse:
    service = request.app[SERVICE]
    if request.path not in (LOAD_PATH, UNLOAD_PATH):
        check_key(request, service.keys)
    elif service.adapter_keys:
        check_key(request, service.adapter_keys)
    else:
        raise ApiError("loading of adapters is off", "deploy with openai_adapter_keys_file", status=404)
    return await handler(request)


@web.middleware
async def _worded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every failure into OpenAI's form; an unexpected failure is logged, and said without its details."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(error)
    except web.HTTPException as error:
        return _refusal(_from_http(request, error))
    except ConnectionError:
        raise  # the client has gone, so no answer is read
    except Exception:
        _LOG.exception("request %s failed", request[RECORD].id)
        return _refusal(ApiError("the endpoint failed on this request", "see its log", status=500))


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 404:
        return ApiError(f"there is no {request.path}", "see docs/openai.md for what there is", status=404)
    allow = error.headers.get("Allow")
    headers = {"Allow": allow} if allow else {}
    return ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status, headers=headers)


def _refusal(error: ApiError) -> web.Response:
    return web.json_response(error.body, status=error.status, headers=error.headers)
