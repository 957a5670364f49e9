"""What can be asked about the endpoint itself: models, tokens, health, version, metrics."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from deployment.openai.answers.reading import read_asked, read_body, send_json
from deployment.openai.errors import ApiError
from deployment.openai.service import Service, service_of
from deployment.openai.texts.offered_models import Model
from handover.provenance import VERSION


async def list_models(request: web.Request) -> web.Response:
    """Answer ``GET /v1/models``."""
    service = service_of(request)
    models = [_described(service, model, name) for model in service.models.all for name in model.names]
    adapters = await service.adapters.paths(service.models)
    models += [await _described_adapter(service, name) for name in adapters]
    return web.json_response({"object": "list", "data": models})


async def show_model(request: web.Request) -> web.Response:
    """Answer ``GET /v1/models/{id}``."""
    service, name = service_of(request), request.match_info["id"]
    if name in service.models.names:
        return web.json_response(_described(service, service.models.find(name), name))
    return web.json_response(await _described_adapter(service, name))


async def _described_adapter(service: Service, name: str) -> dict[str, Any]:
    """Describe an adapter as vLLM does: the directory that it comes from, and the model that it belongs to."""
    base = service.models.find_base(name)
    model = await service.adapters.resolve(base, name, service.models)
    root = (await service.adapters.paths(service.models)).get(name, "")
    return {**_described(service, model, name), "root": root, "parent": base.names[0]}


def _described(service: Service, model: Model, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "slipway",
        "root": model.engine,
        "parent": None,
        "max_model_len": model.max_positions,
        "is_encoder_decoder": model.is_encoder_decoder,
        "settings": model.settings,
    }


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Answer ``POST /tokenize``: the tokens of a text."""
    return await _written(request, "tokenize")


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Answer ``POST /detokenize``: the text of tokens."""
    return await _written(request, "detokenize")


async def _written(request: web.Request, name: str) -> web.StreamResponse:
    """Answer with what reading the request has made."""
    service, body = service_of(request), await read_body(request)
    with service.admitted():
        _, _, written = await read_asked(service, name, body)
    assert not isinstance(written, tuple)
    return await send_json(request, written)


async def tokenizer_info(request: web.Request) -> web.Response:
    """Answer ``GET /tokenizer_info``: what a client needs to tokenize by itself."""
    model = service_of(request).models.find(request.query.get("model"))
    texts = model.texts
    start = texts.decode(texts.ids.before[:1]) if texts.ids.before else None
    end = texts.decode([texts.end_id])
    named = {} if model.chat is None else model.chat.tokens
    content = {
        "tokenizer_class": type(texts.tokenizer).__name__,
        "bos_token": start or named.get("bos_token"),
        "eos_token": end,
        "pad_token": named.get("pad_token", end),
        "eos_token_id": texts.end_id,
        "vocab_size": model.vocab_size,
        "model_max_length": model.max_positions,
        "add_bos_token": bool(texts.ids.before),
        "chat_template": None if model.chat is None else model.chat.template,
    }
    return web.json_response(content)


async def health(request: web.Request) -> web.Response:
    """Answer ``GET /health``: whether the models take requests."""
    service = service_of(request)
    if await service.triton.is_ready([model.engine for model in service.models.all]):
        return web.Response()
    raise ApiError("the server behind this endpoint is not ready", "see its log", status=503)


async def version(request: web.Request) -> web.Response:
    """Answer ``GET /version``."""
    return web.json_response({"version": VERSION})


_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATIENCE_S = 10.0


async def metrics(request: web.Request) -> web.Response:
    """Answer with both; the endpoint's own alone where Triton's address is not known."""
    service = service_of(request)
    text = await _tritons(service.metrics_url) if service.metrics_url else ""
    return web.Response(text=text + _own(service), headers={"Content-Type": _CONTENT_TYPE})


async def _tritons(url: str) -> str:
    try:
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            answer.raise_for_status()
            text = await answer.text()
    except (aiohttp.ClientError, asyncio.TimeoutError, TimeoutError) as error:
        raise ApiError(f"Triton's metrics cannot be read: {error}", "see the server's log", status=503) from error
    return text if text.endswith("\n") else f"{text}\n"


def _own(service: Service) -> str:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    used = resource.getrusage(resource.RUSAGE_SELF)
    values = (
        ("slipway_openai_requests_active", "gauge", "Requests that the endpoint is answering", service.active),
        ("process_resident_memory_bytes", "gauge", "Memory of the endpoint", pages * os.sysconf("SC_PAGE_SIZE")),
        ("process_cpu_seconds_total", "counter", "Processor time of the endpoint", used.ru_utime + used.ru_stime),
        ("process_start_time_seconds", "gauge", "Start of the endpoint", service.started),
        ("process_uptime_seconds", "gauge", "Age of the endpoint", time.time() - service.started),
    )
    return "".join(
        f"# HELP {name} {meaning}\n# TYPE {name} {kind}\n{name} {value}\n" for name, kind, meaning, value in values
    )
