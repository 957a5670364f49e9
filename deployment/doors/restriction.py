"""Triton's APIs that clients need not have: closed to all who do not send a header that only the owner can read.

Whoever reaches a server's port may otherwise register shared memory and have answers written into a stub's own region,
load and unload models, and set log and trace options. Triton takes the header's value on its command line alone, which
every user of the node can read in /proc; so it is blanked there as soon as the server has read it.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from handover.errors import ServerError, nearest

APIS = ("shared_memory", "model_repository", "logging", "trace")
HEADER = "slipway-key"
_HTTP, _GRPC = "http-restricted-api", "grpc-restricted-protocol"

_SECRET_BYTES = 24
_HELP_TIMEOUT_S = 60


class Restriction:
    """The flags that close the APIs, and the secret in them.

    Args:
        binary: tritonserver, which is asked whether it knows such flags; those of FasterTransformer's days do not.
        environment: that it needs.
        opened: of APIS, those that stay open to everybody.
        server_args: a person's own flags; those of this kind take the place of ours.

    Attributes:
        flags: for the server's command line.
        secret: that opens the APIs; empty where there are no flags.
        closed, unknown: APIs that are closed; flags that this server does not know.

    Raises:
        ServerError: there is no such API.
    """

    def __init__(
        self, binary: Path, environment: Mapping[str, str], opened: Sequence[str], server_args: Sequence[str]
    ) -> None:
        for name in opened:
            if name not in APIS:
                raise ServerError(f"deployment.open_apis: '{name}' is no API that is closed", nearest(name, APIS))
        self.closed = tuple(name for name in APIS if name not in opened)
        known = known_flags(binary, environment) if self.closed else frozenset[str]()
        wanted = [name for name in (_HTTP, _GRPC) if not any(given.startswith(f"--{name}") for given in server_args)]
        self.unknown = tuple(name for name in wanted if name not in known) if self.closed else ()
        self.secret = secrets.token_hex(_SECRET_BYTES)
        names = ",".join(name.replace("_", "-") for name in self.closed)
        self.flags = tuple(f"--{name}={names}:{HEADER}={self.secret}" for name in wanted if name in known)
        if not self.flags:
            self.secret = ""

    def write(self, endpoint: Path) -> None:
        """Write the header for the owner of this deployment: ``curl -H @endpoint.header``."""
        file = header_file(endpoint)
        file.unlink(missing_ok=True)
        if self.secret:
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                stream.write(f"{HEADER}: {self.secret}\n")


def header_file(endpoint: Path) -> Path:
    """File with the header that opens the closed APIs, beside the endpoint file; its owner alone can read it."""
    return endpoint.with_suffix(".header")


def known_flags(binary: Path, environment: Mapping[str, str]) -> frozenset[str]:
    """Ask a tritonserver which flags it takes; none where it does not say."""
    try:
        said = subprocess.run(
            [binary, "--help"],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_HELP_TIMEOUT_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(re.findall(r"^\s*--([a-z0-9-]+)", said.decode(errors="replace"), re.MULTILINE))
