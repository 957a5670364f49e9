"""Where Triton listens, and whether the guard stands in front of it: ``deployment.guard``. Standard library only."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from deployment.arguments import ServeArguments
from deployment.doors.address import own_address
from deployment.doors.ports import Ports, choose_ports
from handover.errors import ServerError, nearest
from handover.host_names import addresses_of

AUTO, ALWAYS, NEVER = "auto", "always", "never"
GUARDS = (AUTO, ALWAYS, NEVER)
_LOOPBACK = "127.0.0.1"
_ADDRESSES = ("http-address", "grpc-address", "metrics-address")
_OTHER_DOORS = ("allow-sagemaker", "allow-vertex-ai")
_PLACES = (*_ADDRESSES, "http-port", "grpc-port", "metrics-port", "reuse-http-port", "reuse-grpc-port")
_TLS = ("grpc-use-ssl", "grpc-use-ssl-mutual")


@dataclass(frozen=True)
class Doors:
    """Where Triton itself listens.

    Attributes:
        host, ports: of Triton.
        is_guarded: whether they are private, and the guard listens on the public ones.
    """

    host: str
    ports: Ports
    is_guarded: bool

    @property
    def address(self) -> str:
        """Where this host reaches Triton itself."""
        return own_address(self.host)


def find_doors(arguments: ServeArguments, public: Ports) -> Doors:
    """Choose where Triton listens; behind the guard these are free ports of loopback."""
    if not is_guarded(arguments):
        return Doors(arguments.host, public, False)
    taken = set(astuple(public))
    while True:
        private = choose_ports(_LOOPBACK, {"http": 0, "grpc": 0, "metrics": 0})
        if not taken & {private.http, private.grpc, private.metrics}:  # the public ones are not yet listened on
            return Doors(_LOOPBACK, private, True)


def is_guarded(arguments: ServeArguments) -> bool:
    """Whether the guard stands in front of Triton.

    Raises:
        ServerError: there is no such setting, or flags of a person's own would open a way around the guard.
    """
    if arguments.guard not in GUARDS:
        raise ServerError(f"deployment.guard: '{arguments.guard}' is unknown", nearest(arguments.guard, GUARDS))
    if arguments.guard == NEVER:
        return False
    guarded = arguments.guard == ALWAYS or not is_loopback(arguments.host)
    for name, value in _flags(arguments.server_args):
        opens = name in _OTHER_DOORS and value.lower() not in ("false", "0")
        moves = name in _PLACES if guarded else name in _ADDRESSES and not is_loopback(value)
        if opens or moves or guarded and name in _TLS:
            raise ServerError(
                f"deployment.server_args: --{name} would open Triton to others without the guard",
                "set deployment.host, http_port, grpc_port and metrics_port; or take deployment.guard=never, with "
                "which every client can end this server (SECURITY.md)",
            )
    return guarded


def is_loopback(host: str) -> bool:
    """Whether only this host reaches a server that listens there."""
    try:
        found = {entry[4][0] for entry in addresses_of(host)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def _flags(server_args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield flags that matter here, and their values; Triton takes a flag by the beginning of its name too."""
    for position, argument in enumerate(server_args):
        name, separator, value = argument.lstrip("-").partition("=")
        following = server_args[position + 1] if position + 1 < len(server_args) else ""
        for whole in (*_PLACES, *_OTHER_DOORS, *_TLS):
            if argument.startswith("--") and name and whole.startswith(name):
                yield whole, value if separator else following
