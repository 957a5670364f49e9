"""The endpoint's process: connect, listen, serve until it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from pathlib import Path

from aiohttp import web

from deployment.openai.access import read_keys
from deployment.openai.application import build_application
from deployment.openai.arguments import OpenAIArguments
from deployment.openai.models import find_models
from deployment.openai.service import Service
from deployment.openai.triton import Triton
from handover.endpoint import Endpoint
from handover.errors import ServerError

_BACKLOG = 1024


async def serve(arguments: OpenAIArguments) -> None:
    """Serve until SIGTERM or Ctrl-C; requests in flight then have ``exit_timeout_s`` seconds.

    Raises:
        SlipwayError: no server answers, no tokenizer can be read, or the port is taken.
    """
    endpoint = Endpoint.read(arguments.endpoint)
    triton = Triton(endpoint.grpc_url, arguments.sockets or (Path(endpoint.sockets) if endpoint.sockets else None))
    try:
        keys = read_keys(arguments.api_keys_file)
        models = await find_models(arguments, endpoint, triton)
        service = Service(arguments, triton, models, keys, arguments.metrics_url or _metrics_url(endpoint))
        runner = web.AppRunner(
            build_application(service),
            access_log=None,
            handler_cancellation=True,  # a client that hangs up
            shutdown_timeout=arguments.exit_timeout_s,
        )
        await runner.setup()
        try:
            await _listen(runner, arguments)
            gc.freeze()  # or collections would look again and again through all that the libraries consist of
            await _stop_signal()
        finally:
            await runner.cleanup()
    finally:
        await triton.close()


async def _listen(runner: web.AppRunner, arguments: OpenAIArguments) -> None:
    site = web.TCPSite(
        runner, arguments.host, arguments.port, backlog=_BACKLOG, reuse_port=arguments.shares_port or None
    )
    try:
        await site.start()
    except OSError as error:
        raise ServerError(
            f"port {arguments.port} on {arguments.host} cannot be used: {error.strerror or error}",
            "choose another port, or 0 for a free one",
        ) from error
    host, port = runner.addresses[0][:2]
    shown = f"[{host}]" if ":" in host else host
    sys.stdout.write(f"      openai     http://{shown}:{port}/v1\n")
    sys.stdout.flush()


def _metrics_url(endpoint: Endpoint) -> str:
    return f"http://{endpoint.host}:{endpoint.metrics_port}/metrics" if endpoint.metrics_port else ""


async def _stop_signal() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    await stop.wait()
