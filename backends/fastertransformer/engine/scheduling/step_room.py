"""How many tokens of contexts a step runs beside rows that decode: what these wait for, and what waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..rows.sequence import Sequence
from ..steps.steps import Steps
from .tuning import TUNING


class StepRoom(NamedTuple):
    """What a step has room for.

    Attributes:
        most: tokens of contexts and of rows that decode.
        captured: tokens of contexts with which the step stays one captured pass; 0: it need not.
    """

    most: int
    captured: int = 0


def measure_room(steps: Steps, decoding: int, waiting: Iterable[Sequence], most: int) -> StepRoom:
    """Choose what the next step has room for, where a pass runs ``most`` tokens.

    While little waits, several captured passes run it as fast as one pass of its own, and the rows that decode wait for
    one of them at a time. A burst is run in large passes, and a large burst in several a step, for rows that decode
    have a token in each step: they are slowed down in any case, and the fewer steps they take, the sooner it is over.
    """
    if not decoding or not (room := steps.mixed_room(decoding)):
        return StepRoom(most)
    tokens = sum(each.tokens_to_run(each.skipped) for each in waiting)
    if tokens <= TUNING.burst_tokens:
        return StepRoom(decoding + room, room)
    return StepRoom(TUNING.burst_passes * most if tokens > TUNING.burst_passes * most else most)
