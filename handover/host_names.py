"""Names of hosts, as anybody may write them. Standard library only."""

from __future__ import annotations

import socket
from typing import Any


def addresses_of(host: str, port: int | None = None, **how: Any) -> list[Any]:
    """Return what ``socket.getaddrinfo`` finds.

    Raises:
        OSError: there is no such host; a name that no host can have, by the length of its parts, is one of these too.
    """
    try:
        return list(socket.getaddrinfo(host, port, **how))
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"no host can have this name: {error}") from error
