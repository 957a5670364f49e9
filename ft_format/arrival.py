"""When a request arrived: what a program that passes it on to Triton says of it, and how the engine reads that.

A program of the engine's host that takes requests in, such as the OpenAI endpoint, gives its own time with a request:
``slipway_arrival``, the host's boot id, a slash and nanoseconds of ``time.monotonic``. What the request waited for
before it came to the engine is then a part of its times. Other hosts' clocks are of no use here.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

PARAMETER = "slipway_arrival"
_LONGEST_S = 600.0
_MOST_DIGITS = 20


def written(arrived_ns: int) -> str:
    """Return the parameter of a request that came at this time of ``time.monotonic_ns``."""
    return f"{_boot_id()}/{arrived_ns}"


def arrival_s(parameters: str, opened_s: float) -> float:
    """Return when a request arrived, in seconds of ``time.monotonic``."""
    if PARAMETER not in parameters:
        return opened_s
    host, _, given = str(json.loads(parameters).get(PARAMETER, "")).partition("/")
    if not host or host != _boot_id() or not given.isdecimal() or len(given) > _MOST_DIGITS:
        return opened_s
    return credible_s(int(given), opened_s)


def credible_s(arrived_ns: int, opened_s: float) -> float:
    """Return a time of arrival on this host's clock in seconds, or when the engine got the request if it cannot be."""
    arrived_s = arrived_ns / 1e9
    return arrived_s if opened_s - _LONGEST_S < arrived_s < opened_s else opened_s


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # the engine then counts from where it gets a request
        return ""
