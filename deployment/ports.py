"""TCP ports for the server: given ones are checked, the others are free ones. Standard library only."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from handover.errors import ServerError

_LARGEST = 65535


@dataclass(frozen=True)
class Ports:
    """Where the three services of one server listen."""

    http: int
    grpc: int
    metrics: int


def choose_ports(host: str, given: Mapping[str, int]) -> Ports:
    """Check the given ports and find free ones for the rest.

    All three are held at once while choosing, so they differ. They are let go before the server takes
    them; should another program be faster, the server says so and ends.

    Args:
        host: address to listen on.
        given: "http", "grpc" and "metrics" to a port; 0 for a free one.

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


def _hold(host: str, service: str, port: int) -> socket.socket:
    if not 0 <= port <= _LARGEST:  # getaddrinfo would take it modulo 65536
        raise ServerError(f"port {port} cannot be used for {service}: ports end at {_LARGEST}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ServerError(f"cannot listen on host '{host}', port {port} ({service}): {error}") from error
    listener = socket.socket(family, kind, protocol)
    # Connections of an earlier server in TIME_WAIT do not hold a port; a listener does.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1)
    except OSError as error:
        listener.close()
        raise ServerError(
            f"port {port} on {host} cannot be used for {service}: {error.strerror or error}",
            f"choose another deployment.{service}_port, or 0 for a free one",
        ) from error
    return listener
