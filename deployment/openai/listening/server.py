"""The endpoint's process: connect, listen, serve until it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from pathlib import Path

from aiohttp import web

from deployment.doors.address import place_of
from deployment.openai.arguments import OpenAIArguments
from deployment.openai.engine.triton import Triton
from deployment.openai.listening.access import read_keys
from deployment.openai.listening.application import build_application
from deployment.openai.listening.connections import ACCEPTED_AT_ONCE, Connections
from deployment.openai.listening.quiet_log import keep_log_quiet, log_of_loop
from deployment.openai.models import find_models
from deployment.openai.service import Service
from deployment.processes.heartbeat import Beating
from handover.endpoint import Endpoint
from handover.errors import ServerError
from handover.host_names import addresses_of

_BACKLOG = 1024


async def serve(arguments: OpenAIArguments) -> None:
    """Serve until SIGTERM or Ctrl-C; requests in flight then have ``exit_timeout_s`` seconds.

    Raises:
        SlipwayError: no server answers, no tokenizer can be read, or the port is taken.
    """
    keep_log_quiet()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_of_loop)
    beating = loop.create_task(Beating().go_on())
    endpoint = Endpoint.read(arguments.endpoint)
    triton = Triton(endpoint.grpc_url, arguments.sockets or (Path(endpoint.sockets) if endpoint.sockets else None))
    try:
        keys = read_keys(arguments.api_keys_file)
        models = await find_models(arguments, endpoint, triton)
        of_adapters = read_keys(arguments.adapter_keys_file)
        metrics_url = arguments.metrics_url or _metrics_url(endpoint)
        service = Service(arguments, triton, models, keys, metrics_url, adapter_keys=of_adapters)
        runner = web.AppRunner(
            build_application(service),
            handler_cancellation=True,  # a client that hangs up
            shutdown_timeout=0,  # requests in flight have had their time then
        )
        await runner.setup()
        try:
            await service.check_templates()
            await _run(runner, arguments)
        finally:
            await runner.cleanup()
    finally:
        beating.cancel()
        await triton.close()


async def _run(runner: web.AppRunner, arguments: OpenAIArguments) -> None:
    """Listen until it is asked to stop."""
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    with _bind(arguments) as listening:
        connections = Connections(runner.server, arguments.max_requests)
        server = await loop.create_server(connections, sock=listening, backlog=ACCEPTED_AT_ONCE)
        listening.listen(_BACKLOG)
        sys.stdout.write(f"      openai     http://{place_of(*listening.getsockname()[:2])}/v1\n")
        sys.stdout.flush()
        gc.freeze()  # or collections would look again and again through all that the libraries consist of
        sweeping = asyncio.create_task(connections.sweep())
        try:
            await _stop_signal()
        finally:
            sweeping.cancel()
            server.close()
            await connections.end(arguments.exit_timeout_s)


def _bind(arguments: OpenAIArguments) -> socket.socket:
    """Take the port; ServerError: that cannot be done."""
    try:
        found = addresses_of(arguments.host, arguments.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, number, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        listening = socket.socket(family, kind, number)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if arguments.shares_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(address)
        listening.setblocking(False)
    except OSError as error:
        raise ServerError(
            f"port {arguments.port} on {arguments.host} cannot be used: {error.strerror or error}",
            "choose another port, or 0 for a free one",
        ) from error
    return listening


def _metrics_url(endpoint: Endpoint) -> str:
    return f"http://{endpoint.host}:{endpoint.metrics_port}/metrics" if endpoint.metrics_port else ""


async def _stop_signal() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    await stop.wait()
