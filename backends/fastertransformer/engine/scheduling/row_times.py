"""When what happened to a row of a request; see metrics.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RowTimes:
    """Times by the clock of EngineMetrics; None: it has not happened.

    Attributes:
        begun_s: the row joined the batch for the first time.
        first_s: the host had its first token, or what it has instead of tokens.
        last_s: the host had its last token so far.
        steps: of which the tokens were counted. A step that is repeated after a failure is not counted twice.
    """

    begun_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    steps: int = -1
