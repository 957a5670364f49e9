"""TCP ports for the server: given ones are checked, the others are free ones. Standard library only."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from errno import EADDRNOTAVAIL
from pathlib import Path

from handover.errors import ServerError
from handover.host_names import addresses_of

_LARGEST = 65535
_FIRST_FREE = 10_000  # below are the ports that services are known by
_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # man 7 ip
_TRIALS = 50
_OWN = "deployment.host is an address of this machine: 127.0.0.1 for its own clients, 0.0.0.0 for all"


@dataclass(frozen=True)
class Ports:
    """Where the services of one server listen; ``openai`` is None where it is off."""

    http: int
    grpc: int
    metrics: int
    openai: int | None = None


def choose_ports(host: str, given: Mapping[str, int]) -> Ports:
    """Check the given ports and find free ones for the rest.

    They are all held at once while choosing, so they differ. They are let go before the server takes them, which it
    does when its models are loaded. In these seconds or minutes the kernel gives away ports of its own range, to every
    connection of this machine; so free ones are taken below that. Should another program be faster all the same, the
    server says so and ends.

    Args:
        host: address to listen on.
        given: "http", "grpc", "metrics" and "openai" to a port; 0 for a free one.

    Raises:
        ServerError: a given port is in use, given twice, or not allowed; the host is no address of this machine.
    """
    held: dict[str, socket.socket] = {}
    try:
        # Given ports first: a free one must not take the place of a given one.
        for service in sorted(given, key=lambda name: given[name] == 0):
            held[service] = _hold(host, service, given[service])
        return Ports(**{service: int(held[service].getsockname()[1]) for service in given})
    finally:
        for listener in held.values():
            listener.close()


def find_neighbours(host: str, count: int) -> int:
    """Find free ports that follow each other, for programs that are told the first; returns that.

    Raises:
        ServerError: there are none.
    """
    for first in _free_ports():
        held: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                held.append(_hold(host, "the other nodes", port))
            return first
        except ServerError:  # one is in use
            continue
        finally:
            for listener in held:
                listener.close()
    raise ServerError(f"there are no {count} free ports one after another on {host}")


def _hold(host: str, service: str, port: int) -> socket.socket:
    if not 0 <= port <= _LARGEST:  # getaddrinfo would take it modulo 65536
        raise ServerError(f"port {port} cannot be used for {service}: ports end at {_LARGEST}")
    try:
        family, _, _, _, address = addresses_of(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ServerError(f"cannot listen on host '{host}', port {port} ({service}): {error}", _OWN) from error
    for candidate in _free_ports() if port == 0 else ():
        with suppress(OSError):  # in use
            return _listen(family, (address[0], candidate, *address[2:]))
    try:
        return _listen(family, address)
    except OSError as error:
        if error.errno == EADDRNOTAVAIL:
            raise ServerError(f"cannot listen on host '{host}' ({service}): {error.strerror}", _OWN) from error
        raise ServerError(
            f"port {port} on {host} cannot be used for {service}: {error.strerror or error}",
            f"choose another deployment.{service}_port, or 0 for a free one",
        ) from error


def _free_ports() -> list[int]:
    """Return some ports that the kernel never assigns by itself; none where it assigns all, or without Linux."""
    try:
        end = int(_KERNELS_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return []
    candidates = range(_FIRST_FREE, end)
    return random.SystemRandom().sample(candidates, min(_TRIALS, len(candidates)))


def _listen(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Connections of an earlier server in TIME_WAIT do not hold a port; a listener does.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener
