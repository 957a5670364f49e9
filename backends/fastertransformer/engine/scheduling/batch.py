"""The sequences that decode, and who sits in which slot.

Slots are filled from the first on: where a sequence leaves, the last one moves in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from ..sampling.sampler import Choice, Flight, Owners
from ..steps.steps import Steps
from .contexts import run_contexts
from .sequence import Sequence


class Batch:
    """Sequences in the order of their coming.

    Args:
        steps: the network and its cache.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps, self._choice = steps, Choice(steps)
        self._sequences: list[Sequence] = []
        self._owners: Owners = []
        self._is_rearranged = False  # since the last step

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def join(self, new: list[Sequence], take_key: Callable[[Sequence], int]) -> Tensor | None:
        """Give sequences their slots, and run their contexts.

        Args:
            new: those.
            take_key: gives what was saved of one; see Sessions.take.

        Returns:
            The last hidden state of each of their slots, see run_contexts.
        """
        first = len(self._owners)
        self._sequences += new
        # Their first beams are side by side, for those are one pass of the network.
        self._owners += [(sequence, 0) for sequence in new]
        self._owners += [(sequence, beam) for sequence in new for beam in range(1, sequence.width)]
        rows = self._owners[first:]
        self._steps.place(
            first,
            np.array([sequence.entries for sequence, _ in rows]),
            np.array([sequence.cached for sequence, _ in rows]),
            np.array([sequence.window for sequence, _ in rows]),
            np.array([sequence.source_length for sequence, _ in rows]),
            np.array([take_key(sequence) for sequence, _ in rows]),
            np.array([-1 if beam else sequence.context.prefix for sequence, beam in rows]),
            np.array([sequence.context.ids[-1] for sequence, _ in rows]) if new[0].source else None,
        )
        self._settle()
        hidden = run_contexts(self._steps, rows, first)
        self._choice.begin(first, [sequence for sequence, _ in rows])  # a GPU is busy with their contexts
        return hidden

    def launch(self, hidden: Tensor | None) -> Flight:
        """Ask for the next token of every slot.

        Args:
            hidden: last hidden state of those that have just come, [n, hidden]; None: all go on from their last token.
        """
        for sequence in self._sequences:
            sequence.launched += 1
        before = len(self._owners) - (0 if hidden is None else len(hidden))
        parts = []
        if before:
            parts.append(self._steps.decode(before))
        if hidden is not None:
            parts.append(self._steps.choose(hidden))
        if self._is_rearranged:
            self._choice.arrange(list(self._owners))
            self._is_rearranged = False
        return self._choice.launch(before, parts)

    def wipe(self, sequences: list[Sequence]) -> None:
        """Forget what the slots of sequences hold."""
        self._steps.wipe(np.array([slot for sequence in sequences for slot in sequence.slots]))

    def leave(self, sequences: list[Sequence]) -> None:
        """Free slots, and fill the gaps with the last ones."""
        if not sequences:
            return
        gone = set(sequences)
        self._sequences = [sequence for sequence in self._sequences if sequence not in gone]
        stays = np.array([sequence not in gone for sequence, _ in self._owners])
        kept = int(stays.sum())
        gaps = np.flatnonzero(~stays[:kept])
        sources = kept + np.flatnonzero(stays[kept:])
        self._steps.leave(len(self._owners), kept, gaps, sources)
        if len(gaps):
            self._choice.move(gaps, sources)
        for gap, source in zip(gaps.tolist(), sources.tolist(), strict=True):
            self._owners[gap] = self._owners[source]
        del self._owners[kept:]
        self._settle()

    def _settle(self) -> None:
        """Note who sits where."""
        for sequence in self._sequences:
            sequence.slots = [0] * sequence.width
        for slot, (sequence, place) in enumerate(self._owners):
            sequence.slots[place] = slot
        self._is_rearranged = True
