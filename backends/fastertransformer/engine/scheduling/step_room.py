"""How many tokens of contexts a step runs beside rows that decode: what these wait for, and what waits."""

from __future__ import annotations

from collections.abc import Iterable

from ..rows.sequence import Sequence
from ..steps.steps import Steps
from .tuning import TUNING


def captured_room(steps: Steps, decoding: int, waiting: Iterable[Sequence]) -> int:
    """Return the tokens of contexts with which a step stays one captured pass; 0: a pass may have more.

    While little waits, several such steps run it as fast as one pass of its own, and the rows that decode wait for one
    of them at a time. A burst is run in few large passes.
    """
    room = steps.mixed_room(decoding) if decoding else 0
    tokens = 0
    for sequence in waiting if room else ():
        tokens += sequence.tokens_to_run(sequence.skipped)
        if tokens > TUNING.burst_tokens:
            return 0
    return room
