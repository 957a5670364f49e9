"""What a server says by headers and bodies of refusals, in words for a message."""

from __future__ import annotations

import http.client
import json
import time
from email.utils import parsedate_to_datetime

from handover.errors import shortened


def retry_after_s(headers: http.client.HTTPMessage) -> float | None:
    """Return the pause that a server asks for; a date counts from the server's own clock, where it tells it."""
    given = (headers.get("Retry-After") or "").strip()
    if not given:
        return None
    if given.replace(".", "", 1).isdigit():
        return float(given)
    try:
        until = parsedate_to_datetime(given).timestamp()
        now = parsedate_to_datetime(headers["Date"]).timestamp() if headers["Date"] else time.time()
    except (TypeError, ValueError):
        return None
    return max(0.0, until - now)


def message(content: bytes) -> str:
    """Return a server's own words for an error: OpenAI's form, vLLM's older one, or that of FastAPI."""
    try:
        found = json.loads(content)
    except ValueError:
        return ""
    if not isinstance(found, dict):
        return ""
    error = found.get("error")
    said = error.get("message") if isinstance(error, dict) else error
    said = said or found.get("message") or found.get("detail") or ""
    return shortened(said if isinstance(said, str) else json.dumps(said), 500)


def summary(content: bytes) -> str:
    """Show the beginning of what is no JSON on one line."""
    return shortened(" ".join(content.decode(errors="replace").split()), 120) or "nothing"
