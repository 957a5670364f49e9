"""HAProxy: Triton's HTTP and gRPC and the OpenAI API, each request to the server with the fewest in flight.

Written for HAProxy 2.4 and later (Debian 12 has 2.6). Standard library only.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

from deployment.replicas.router import Front, Router
from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError, shortened
from handover.host_names import addresses_of

CONFIG_FILE = "haproxy.cfg"
_SOCKET = "haproxy.sock"
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_ANSWER_S = 5.0
_COUNT_S = 1.0
"""For a number, which is asked for again: while the router stands still, nothing else is looked after."""
_ERRORS = {
    502: "the server that had this request ended before it answered; send it again",
    503: "no server is ready; send it again",
    504: "the server that had this request did not answer in time; send it again",
}
_GLOBAL = """\
global
    fd-hard-limit 65536
{told}
defaults
    mode http
    # Refused connections alone are tried again: a request that ends one server shall not go to the next.
    retries 3
    retry-on conn-failure
    option redispatch 1
    option abortonclose
    option clitcpka
    option srvtcpka
    timeout connect 5s
    timeout queue 30s
    timeout http-request 30s
    timeout http-keep-alive 15m
    timeout client 24h
    timeout server 24h
"""
_METRICS = """
frontend metrics-in
    bind {place}
    maxconn 64
    http-request deny unless METH_GET
    default_backend metrics

backend metrics
    server summed 127.0.0.1:{page}
"""

_RESOLVERS = """
resolvers names
    parse-resolv-conf
    accepted_payload_size 8192
    hold valid 2s
"""
ROUTERS_HEALTH = "/router-health"
"""Where a router that finds its servers by name says that it is up itself."""
_OF_NAMES = f"""\
    monitor-uri {ROUTERS_HEALTH}
    # They would be those of one server.
    http-request deny deny_status 404 if {{ path /metrics }}
"""


def check_header(name: str) -> None:
    """Refuse what is no name of a header; ConfigError."""
    if not _HEADER.fullmatch(name):
        raise ConfigError(
            f"deployment.affinity_header='{shortened(name)}' is no name of a header", "such as X-Session-Id"
        )


def render(front: Front, socket_path: Path) -> str:
    """Write the configuration; pure. Servers are closed in it, without an address: both come while it runs.

    Raises:
        ConfigError: the header of the affinity has no name of one.
    """
    numbers = range(front.replicas)
    text = _render(
        front,
        f"    stats socket {socket_path} mode 600 level admin\n",
        lambda _, words: "".join(f"    server replica{number} 127.0.0.1:1{words} disabled\n" for number in numbers),
        "    use_backend metrics if { path /metrics }\n",
    )
    return text + _METRICS.format(place=f"{_place(front.host)}:{front.metrics}", page=front.page)


def render_for_names(front: Front, name: str, health: tuple[str, str]) -> str:
    """Write the configuration of one that finds its servers by the named ports of a Service (SRV records); pure.

    They are asked for their health every two seconds. There is no page of metrics.

    Args:
        front: of it; the Service's ports have the same names.
        name: of the Service; variables of HAProxy's environment in it are replaced.
        health: service that is asked for the health of a server, and the path there.
    """
    service, path = health
    asked = f"check port {front.ports[service]} check-proto h1 inter 2s fall 2 resolvers names init-addr none"

    def servers(each: str, words: str) -> str:
        # Not by server-template, which has check-proto count for the first of them alone (2.6). During a rolling update
        # there is one more than ``replicas``, and one that has just ended may still have its slot.
        place = f'"_{each}._tcp.{name}"{words} {asked}'
        lines = [f"    server replica{number} {place}\n" for number in range(front.replicas + 2)]
        return "".join((f"    option httpchk GET {path}\n", *lines))

    return _render(front, _RESOLVERS, servers, _OF_NAMES)


def _render(front: Front, told: str, servers: Callable[[str, str], str], of_http: str) -> str:
    """Write what clients reach.

    Args:
        front: of it.
        told: lines between the global part and the defaults.
        servers: returns the lines of a service's servers, given the words that its protocol asks for.
        of_http: lines of each frontend but gRPC's.
    """
    header = front.affinity_header
    if header is not None:
        check_header(header)
    text = [_GLOBAL.format(told=told)]
    for status, said in _ERRORS.items():
        body = json.dumps({"error": {"message": said, "type": "server_error", "code": status}})
        text.append(f"    http-error status {status} content-type application/json string '{body}' hdr Retry-After 1\n")
    for service, port in front.ports.items():
        words = " proto h2" if service == "grpc" else ""
        text += [f"\nfrontend {service}-in\n", f'    bind "{_place(front.host)}:{port}"{words}\n']
        text.append(of_http if service != "grpc" else "")
        if header is not None:
            text.append(f"    use_backend {service}-affine if {{ req.hdr({header}) -m found }}\n")
        text.append(f"    default_backend {service}\n")
        lines = servers(service, words)
        text += [f"\nbackend {service}\n", "    balance leastconn\n", lines]
        if header is not None:
            # Consistent: a replica that is away moves its own sessions alone, and has them again afterwards.
            balance = f"    balance hdr({header})\n    hash-type consistent\n"
            text += [f"\nbackend {service}-affine\n", balance, lines]
    return "".join(text)


def _place(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class HAProxy(Router):
    """HAProxy, asked and told through a socket in the deployment's private directory."""

    name = "haproxy"
    title = "HAProxy"
    own_command = ("haproxy",)
    is_for_openai = False

    def argv(self) -> tuple[str, ...]:
        """Write the configuration; HAProxy stays in the foreground, in one process."""
        file = self._directory / CONFIG_FILE
        file.write_text(render(self._front, self._directory / _SOCKET))
        return (self.program(), *self._command[1:], "-db", "-f", str(file))

    def is_up(self) -> bool:
        """Whether it answers at its socket, which it opens after its ports."""
        with contextlib.suppress(ServerError):
            return "Version" in self._ask("show info")
        return False

    def admit(self, number: int, endpoint: Endpoint) -> None:
        """Tell it where the replica listens, and open it."""
        address = str(addresses_of(endpoint.host)[0][4][0])
        for backend, port in self._backends(endpoint):
            server = f"{backend}/replica{number}"
            self._tell(f"set server {server} addr {address} port {port}")
            self._tell(f"set server {server} state ready")

    def withdraw(self, number: int) -> None:
        """Close the replica to new requests."""
        for backend, _ in self._backends():
            self._tell(f"set server {backend}/replica{number} state maint")

    def in_flight(self, number: int) -> int | None:
        """Add up its requests in all backends."""
        return self._count(number, "scur")

    def sent_bytes(self, number: int) -> int | None:
        """Add up what its answers came to."""
        return self._count(number, "bout")

    def _backends(self, endpoint: Endpoint | None = None) -> list[tuple[str, int]]:
        """Name the backends, with the port that a replica has for each."""
        suffixes = ("", "-affine") if self._front.affinity_header is not None else ("",)
        ports = {service: getattr(endpoint, f"{service}_port", None) or 0 for service in self._front.ports}
        return [(service + suffix, port) for service, port in ports.items() for suffix in suffixes]

    def _count(self, number: int, column: str) -> int:
        rows = csv.DictReader(self._ask("show stat", _COUNT_S).lstrip("# ").splitlines())
        return sum(int(row[column] or 0) for row in rows if row["svname"] == f"replica{number}")

    def _tell(self, command: str) -> None:
        """Send a command that is answered by nothing, or by what it has changed."""
        answer = self._ask(command).strip()
        if answer and not re.search("changed|no need to change|nothing changed", answer, re.IGNORECASE):
            raise ServerError(f"HAProxy does not take '{command}': {answer}")

    def _ask(self, command: str, timeout_s: float = _ANSWER_S) -> str:
        answer = b""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(timeout_s)
                connection.connect(str(self._directory / _SOCKET))
                connection.sendall(f"{command}\n".encode())
                while piece := connection.recv(65536):
                    answer += piece
        except OSError as error:
            raise ServerError(f"HAProxy does not answer at its socket: {error}") from error
        return answer.decode(errors="replace")
