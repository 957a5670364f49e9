"""What goes wrong between a client and a served model, whatever the API."""

from __future__ import annotations

from handover.errors import ServerError


class UnreachableError(ServerError):
    """No server answers at the address, or it refuses the key: every further request would fail in the same way."""


class RequestError(ServerError):
    """The server answers, but it refused this request, failed on it or exceeded the time limit."""
