"""Time limits in Slurm's notation, which every cluster type shares."""

from __future__ import annotations

import math
import re

from handover.errors import ConfigError

_NO_LIMIT = ("0", "INFINITE", "UNLIMITED")
_NOTATION = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")


def limit_s(text: str) -> float:
    """Seconds of a time limit; infinity for none.

    sbatch's notations: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and
    days-hours:minutes:seconds.

    Raises:
        ConfigError: it is none of them.
    """
    if text.upper() in _NO_LIMIT:
        return math.inf
    found = _NOTATION.fullmatch(text)
    if not found:
        raise ConfigError(f"'{text}' is not a time limit", "write hours:minutes:seconds, or days-hours:minutes:seconds")
    parts = [int(part) for part in found["clock"].split(":")]
    if found["days"] is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return ((int(found["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: (*parts,)}[len(parts)]
    return (hours * 60 + minutes) * 60 + seconds
