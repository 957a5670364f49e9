"""The steps of one training in a directory: which one is taken, and what is said of that.

The newest is, or the one that the training itself names. A save that was interrupted is an error that names the newest
complete step: it may have been meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from handover.errors import CheckpointError


@dataclass(frozen=True)
class Choice:
    """The step that is taken.

    Attributes:
        name: of its folder.
        remark: that says so; empty: there is no other.
    """

    name: str
    remark: str = ""


def choose(
    where: object, steps: Mapping[str, int], is_complete: Callable[[str], bool], pointed: tuple[str, str] | None = None
) -> Choice:
    """Choose one of several steps.

    Args:
        where: their directory, for the error.
        steps: number of each, by the folder's name; not empty.
        is_complete: whether a folder holds all that its training saved last.
        pointed: the file that names a step, and the step that it names.

    Raises:
        CheckpointError: it is not complete.
    """
    name = pointed[1] if pointed else max(steps, key=lambda each: (steps[each], each))
    if not is_complete(name):
        complete = [each for each in steps if each != name and is_complete(each)]
        newest = max(complete, key=lambda each: (steps[each], each), default=None)
        which = f"which {pointed[0]} names" if pointed else "the newest step"
        raise CheckpointError(
            f"{where}: {name}, {which}, is incomplete: its save was interrupted, or not all of it was copied",
            f"give {where}/{newest}, the newest that is complete" if newest else "no other step is complete",
        )
    if len(steps) == 1:
        return Choice(name)
    newer = sorted((each for each in steps if steps[each] > steps[name]), key=lambda each: (steps[each], each))
    reason = f"which {pointed[0]} names" if pointed else "the newest"
    left_out = f"; newer and left out: {', '.join(newer)}" if newer else ""
    return Choice(name, f"{name} is taken, {reason} of {len(steps)} steps in {where}{left_out}")
