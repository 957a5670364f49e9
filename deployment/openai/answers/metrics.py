"""``GET /metrics``: Triton's own page, which has the engine's metrics by vLLM's names, and the endpoint's process."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from pathlib import Path

import aiohttp
from aiohttp import web

from deployment.openai.errors import ApiError
from deployment.openai.service import Service, service_of

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
