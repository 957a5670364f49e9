"""The sequences that decode, and who sits in which slot.

Slots are filled from the first on: where a sequence leaves, the last one moves in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from ..attention.cache import UNBOUNDED
from ..network.steps import Steps
from .choice import Choice, Flight, Owners
from .sequence import Sequence


class Batch:
    """Sequences in the order of their coming, as far as they have not moved.

    Args:
        steps: the network and its cache.

    Attributes:
        owners: sequence and beam in each slot in use.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps, self._choice = steps, Choice(steps)
        self._sequences: list[Sequence] = []
        self._is_rearranged = False  # since the last choice
        self.owners: Owners = []

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def join(self, new: list[Sequence], take_key: Callable[[Sequence], int]) -> int:
        """Give sequences their slots.

        Args:
            new: those.
            take_key: gives what was saved of one; see Sessions.take.

        Returns:
            Their first slot. Their first beams are side by side, for those are one pass of the network.
        """
        first = len(self.owners)
        self._sequences += new
        self.owners += [(sequence, 0) for sequence in new]
        self.owners += [(sequence, beam) for sequence in new for beam in range(1, sequence.width)]
        rows = self.owners[first:]
        self._steps.place(
            first,
            np.array([sequence.need for sequence, _ in rows]),
            np.array([sequence.cached for sequence, _ in rows]),
            np.array([sequence.window or UNBOUNDED for sequence, _ in rows]),
            np.array([sequence.source_length for sequence, _ in rows]),
            np.array([take_key(sequence) for sequence, _ in rows]),
            np.array([-1 if beam else sequence.context.prefix for sequence, beam in rows]),
            np.array([sequence.context.ids[-1] for sequence, _ in rows]) if new[0].source else None,
        )
        self._settle()
        return first

    def begin(self, first: int) -> None:
        """Let what chooses tokens know of the sequences from a slot on; a GPU is then busy with their contexts."""
        self._choice.begin(first, self.owners[first:])

    def launch(self, before: int, hidden: Tensor | None) -> Flight:
        """Ask for the next token of every slot.

        Args:
            before: slots whose rows go on from their last token.
            hidden: last hidden state of the others, [n, hidden]; None: there are none.
        """
        parts = []
        if before:
            going_on = dict.fromkeys(sequence for sequence, _ in self.owners[:before])
            longest = max(min(each.cached + 1, each.window or UNBOUNDED) for each in going_on)
            parts.append(self._steps.decode(before, longest, max(each.source_length for each in going_on)))
        if hidden is not None:
            parts.append(self._steps.choose(hidden))
        for sequence in self._sequences:
            sequence.launched += 1
        if self._is_rearranged:
            self._choice.arrange(self.owners)
            self._is_rearranged = False
        return self._choice.launch(list(self.owners), before, parts)

    def wipe(self, sequences: list[Sequence]) -> None:
        """Forget what the slots of sequences hold."""
        self._steps.wipe(np.array([slot for sequence in sequences for slot in sequence.slots]))

    def leave(self, sequences: list[Sequence]) -> None:
        """Free slots, and fill the gaps with the last ones."""
        if not sequences:
            return
        gone = set(sequences)
        self._sequences = [sequence for sequence in self._sequences if sequence not in gone]
        stays = np.array([sequence not in gone for sequence, _ in self.owners])
        kept = int(stays.sum())
        gaps = np.flatnonzero(~stays[:kept])
        sources = kept + np.flatnonzero(stays[kept:])
        length = max((self.owners[source][0].cached for source in sources.tolist()), default=0)
        self._steps.leave(len(self.owners), kept, gaps, sources, length)
        if len(gaps):
            self._choice.move(gaps, sources)
        for gap, source in zip(gaps.tolist(), sources.tolist(), strict=True):
            self.owners[gap] = self.owners[source]
        del self.owners[kept:]
        self._settle()

    def _settle(self) -> None:
        """Note who sits where."""
        for sequence in self._sequences:
            sequence.slots = [0] * sequence.width
        for slot, (sequence, place) in enumerate(self.owners):
            sequence.slots[place] = slot
        self._is_rearranged = True
