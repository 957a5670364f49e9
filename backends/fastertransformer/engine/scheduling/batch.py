"""The sequences that decode, and the slot of each.

Slots are filled from the first on: when a sequence frees its slots, the last ones move into the gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from ..sampling.sampler import Owners, PendingTokens, Sampler
from ..steps.steps import Steps
from .contexts import run_contexts
from .sequence import Sequence


class Batch:
    """Sequences in the order in which they joined.

    Attributes:
        pending: tokens that were launched and not yet read, the oldest first.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps, self._sampler = steps, Sampler(steps)
        self._sequences: list[Sequence] = []
        self._owners: Owners = []
        self._has_changed = False  # since the last step
        self.pending: deque[PendingTokens] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def prefill(self, new: list[Sequence], pop_saved: Callable[[Sequence], int]) -> Tensor | None:
        """Allocate slots to new sequences, and run their contexts; see Sessions.pop_saved, and run_contexts."""
        first = len(self._owners)
        self._sequences += new
        # The first beams are adjacent, for one pass of the network prefills them.
        self._owners += [(sequence, 0) for sequence in new]
        self._owners += [(sequence, beam) for sequence in new for beam in range(1, sequence.width)]
        rows = self._owners[first:]
        self._steps.allocate(
            first,
            np.array([sequence.max_entries for sequence, _ in rows]),
            np.array([sequence.cached for sequence, _ in rows]),
            np.array([sequence.window for sequence, _ in rows]),
            np.array([sequence.source_length for sequence, _ in rows]),
            np.array([pop_saved(sequence) for sequence, _ in rows]),
            np.array([-1 if beam else sequence.context.prefix for sequence, beam in rows]),
            np.array([sequence.context.ids[-1] for sequence, _ in rows]) if new[0].source else None,
        )
        self._assign_slots()
        hidden = run_contexts(self._steps, rows, first)
        self._sampler.add_rows(first, [sequence for sequence, _ in rows])  # while a GPU runs the contexts
        return hidden

    def launch(self, hidden: Tensor | None) -> None:
        """Launch a step that gives every slot its next token.

        Args:
            hidden: last hidden state of the slots that were just prefilled, [n, hidden]; None: every slot decodes.
        """
        for sequence in self._sequences:
            sequence.launched += 1
        before = len(self._owners) - (0 if hidden is None else len(hidden))
        parts = []
        if before:
            parts.append(self._steps.decode(before))
        if hidden is not None:
            parts.append(self._steps.argmax(hidden))
        if self._has_changed:
            self._sampler.set_owners(list(self._owners))
            self._has_changed = False
        self.pending.append(self._sampler.sample(before, parts))

    def clear(self, sequences: list[Sequence]) -> None:
        """Zero the cache of sequences, so that infinite numbers do not remain for the next sequences in their slots."""
        self._steps.clear(np.array([slot for sequence in sequences for slot in sequence.slots]))

    def free(self, sequences: list[Sequence]) -> None:
        """Free the slots of sequences, and move the last slots into the gaps."""
        if not sequences:
            return
        freed = set(sequences)
        self._sequences = [sequence for sequence in self._sequences if sequence not in freed]
        stays = np.array([sequence not in freed for sequence, _ in self._owners])
        kept = int(stays.sum())
        gaps = np.flatnonzero(~stays[:kept])
        sources = kept + np.flatnonzero(stays[kept:])
        self._steps.free(len(self._owners), kept, gaps, sources)
        if len(gaps):
            self._sampler.move_rows(gaps, sources)
        for gap, source in zip(gaps.tolist(), sources.tolist(), strict=True):
            self._owners[gap] = self._owners[source]
        del self._owners[kept:]
        self._assign_slots()
        if not self._sequences:
            self.pending.clear()

    def _assign_slots(self) -> None:
        for sequence in self._sequences:
            sequence.slots = [0] * sequence.width
        for slot, (sequence, beam) in enumerate(self._owners):
            sequence.slots[beam] = slot
        self._has_changed = True
