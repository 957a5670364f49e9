"""Time limits in Slurm's notation, which every cluster type shares."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

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


def total(limits: Collection[str]) -> str:
    """The sum of time limits in Slurm's notation; one alone stays as it was written."""
    if len(limits) == 1:
        return next(iter(limits))
    sum_s = sum(limit_s(text) for text in limits)
    if math.isinf(sum_s):
        return "UNLIMITED"
    hours, rest_s = divmod(int(sum_s), 3600)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours}:{rest_s // 60:02}:{rest_s % 60:02}"
