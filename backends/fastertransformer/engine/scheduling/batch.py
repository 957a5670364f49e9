"""The sequences that decode, and the slot of each.

Slots are filled from the first on: when a sequence frees its slots, the last ones move into the gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

import numpy as np
from torch import Tensor

from ..arrays import Array, upload
from ..errors import EngineError
from ..rows.kept_state import StateCopy
from ..rows.reservation import Stage
from ..rows.sequence import Sequence
from ..sampling.pending import Owners, PendingTokens
from ..sampling.sampler import Sampler
from ..steps.graphs import Chosen
from ..steps.steps import Steps
from .contexts import Extend, can_mix, run_chunk, run_contexts, run_heads

_PAGES_TO_GROW = attrgetter("reservation.pages_to_grow")


class Batch:
    """Sequences in the order in which they joined.

    Attributes:
        pending: tokens that were launched and not yet read, the oldest first.
        has_drafting: whether any row may have drafts.
        is_mixed: whether the rows that decode take part in the pass that runs a context.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps, self._sampler = steps, Sampler(steps)
        self._sequences: list[Sequence] = []
        self._owners: Owners = []
        self._has_changed = False  # since the last step
        self.pending: deque[PendingTokens] = deque()
        self.is_mixed = self.has_drafting = False
        self._decoded: Chosen | None = None  # by such a pass
        self._following: Chosen | None = None  # the contexts in it, a row each
        self._verified: tuple[Array, Array] = np.zeros(0), np.zeros(0)  # where its rows were, and the tokens of each

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def prefill(self, new: list[Sequence]) -> Tensor | None:
        """Allocate slots to new sequences, which have their pages, and run their contexts; see run_contexts."""
        first, extend = len(self._owners), self._choose_extend(new)
        self._sequences += new
        # The first beams are adjacent, for one pass of the network prefills them, stage by stage.
        new = sorted(new, key=lambda each: (each.reservation.stage, len(each.reservation.kept.cuts)))
        self._owners += [(sequence, 0) for sequence in new]
        self._owners += [(sequence, beam) for sequence in new for beam in range(1, sequence.width)]
        rows = self._owners[first:]
        self._upload_changes()
        self._steps.slots.allocate(
            first,
            [sequence.reservation.rows[beam] for sequence, beam in rows],
            np.array([sequence.next_position for sequence, _ in rows]),
            np.array([sequence.window for sequence, _ in rows]),
            np.array([-1 if beam or sequence.skipped else sequence.context.prefix for sequence, beam in rows]),
            np.array([sequence.inputs(beam)[-1] for sequence, beam in rows]) if new[0].source else None,
            np.array([sequence.place for sequence, _ in rows]) if self._steps.places else None,
        )
        self._assign_slots()
        run_heads(self._steps, new, first)
        if self.is_mixed:
            self._follow(first)
        hidden = run_contexts(self._steps, rows, first, extend)
        allocator = self._steps.cache.allocator
        allocator.prefixes.fresh.clear()
        for sequence in new:
            if sequence.reservation.stage == Stage.SHARING:
                sequence.reservation.publish()
        nothing = np.empty((2, 0), np.int64)
        first_beams = (each.reservation.rows[0] for each in new)
        allocator.copy_shared(first_beams, lambda pages: self._steps.slots.copy_pages(pages, nothing))
        self._sampler.add_rows(first, rows)  # while a GPU runs the contexts
        return hidden

    def run_chunk(self, sequence: Sequence, count: int) -> None:
        """Run the next tokens of a context, which has their pages, in the slot behind the rows."""
        first, nothing = len(self._owners), np.array([], np.int64)
        extend = self._choose_extend([sequence], count)
        self._upload_changes()
        position, window = np.array([sequence.position]), np.array([sequence.window])
        task = np.array([-1 if sequence.skipped else sequence.context.prefix])
        place = np.array([sequence.place]) if self._steps.places else None
        self._steps.slots.allocate(first, sequence.reservation.rows, position, window, task, None, place)
        if self.is_mixed:
            self._follow(first)
        run_chunk(extend, sequence, count, first)
        self._copy_states([sequence.reservation.keep_state()])
        # A decode step's padding writes to slots that follow its rows.
        self._steps.slots.free(first + 1, first, nothing, nothing)
        self._steps.cache.allocator.prefixes.fresh.clear()
        sequence.reservation.give_back()

    @property
    def decoding(self) -> int:
        """The rows that decode in the next step; 0: no sequence needs one."""
        return len(self._owners) if any(sequence.needs_step for sequence in self._sequences) else 0

    def _choose_extend(self, new: list[Sequence], count: int | None = None) -> Extend:
        """Choose the pass that runs contexts, or ``count`` tokens of one: their own, or one that decodes the rows too.

        Contexts are of one pass if none shares what another one computes, and if all are new or all continue. Only a
        pass of their own may do without pages of new rows, because it reads none.

        Raises:
            EngineError: a row that is continued lacks pages that every pass over it reads.
        """
        lacking = [each for each in new if each.reservation.lacks_read_pages]
        if any(each.reservation.stage != Stage.NEW for each in lacking):
            raise EngineError("a row's context would be continued from pages of the KV cache that it does not have")
        rows = new[0].width if len(new) == 1 and new[0].count and count is None else len(new)
        tokens = count or rows // len(new) * sum(
            len(each.inputs()) - each.reservation.begin_of_last_pass for each in new
        )
        decoding = self.decoding
        self.is_mixed = (
            decoding > 0
            and not lacking
            and self._steps.can_mix(decoding, tokens, rows)
            and len({each.reservation.stage for each in new}) == 1
            and all(can_mix(each, count) for each in new)
        )
        if not self.is_mixed:
            return self._steps.extend

        def mix(ids: Array, starts: Array, lengths: Array, first: int, _: Array | None = None, /) -> Tensor:
            self._decoded, hidden, self._following = self._steps.mix(ids, starts, lengths, first)
            return hidden

        return mix

    def _follow(self, count: int) -> None:
        """Copy the states of the first rows that have come to a page's end, before their next token; see StatePool."""
        if self._steps.cache.states:
            rows = [row for row, beam in self._owners[:count] if not beam and row.needs_step]
            self._copy_states([row.reservation.follow() for row in rows])

    def _copy_states(self, copies: Iterable[StateCopy | None]) -> None:
        if wanted := [copy for copy in copies if copy]:
            self._steps.slots.copy_states(np.array(wanted).T)

    def grow(self) -> bool:
        """Take the pages that the next step needs, the oldest sequence first; false: there are too few."""
        for sequence in self._sequences:
            reservation = sequence.reservation
            if sequence.launched >= reservation.room and sequence.needs_step and not reservation.grow():
                return False
        self._clear_dirty()
        return True

    def _clear_dirty(self) -> None:
        """Zero pages that were freed with numbers that are not finite."""
        if dirty := self._steps.cache.allocator.take_dirty():
            self._steps.slots.clear(np.array(dirty))

    @property
    def pages_to_grow(self) -> int:
        """Pages that the sequences may soon need, a page for each of their rows that is to grow."""
        return sum(map(_PAGES_TO_GROW, self._sequences))

    @property
    def youngest(self) -> Sequence:
        """The sequence that joined last."""
        return self._sequences[-1]

    def _upload_changes(self) -> None:
        """Upload what the device's page tables lack."""
        if (changes := self._steps.cache.allocator.take_changes()) is not None:
            self._steps.slots.update(changes)

    def launch(self, hidden: Tensor | None) -> None:
        """Launch a step that gives every slot its next token.

        Args:
            hidden: last hidden state of the slots that were just prefilled, [n, hidden]; None: every slot decodes.
        """
        before = len(self._owners) - (0 if hidden is None else len(hidden))
        if not self._decoded:
            self._follow(before)
        Sequence.note_launch(self._sequences)
        parts = []
        if before:
            self._upload_changes()
            parts.append(self._decoded or self._steps.decode(before))
        following = self._following
        self._end_mixed()
        if hidden is not None:
            is_known = following is not None and len(following[1]) == len(hidden)  # else further beams begin
            if not (following and is_known):
                adapters = self._steps.slots.adapters_of(slice(before, before + len(hidden)))
                following = self._steps.predictions.argmax(hidden, adapters)
            parts.append(following)
        if self._has_changed:
            self._sampler.set_owners(list(self._owners))
            self._has_changed = False
        self.pending.append(self._sampler.sample(before, parts, self.pending))

    def verify(self, drafts: Mapping[Sequence, list[int]]) -> None:
        """Launch a step that gives every slot its next token, and rows with drafts the tokens after those of these.

        A row is in further slots as if the first one, two, ... tokens of its draft followed; see Sequence.assume. No
        token is pending.
        """
        own = [drafts.get(sequence, []) for sequence, _ in self._owners]
        lengths, starts = np.array([1 + len(draft) for draft in own]), self._positions()
        ids = np.concatenate([(row.last_token(beam), *own[at]) for at, (row, beam) in enumerate(self._owners)])
        is_first = np.zeros(len(ids), bool)
        is_first[np.cumsum(lengths) - lengths] = True
        self._follow(len(self._owners))
        Sequence.note_launch(self._sequences)
        self._upload_changes()
        hidden = self._steps.verify(ids, starts, lengths)
        self._verified = starts, lengths
        assumed = [
            (row.assume(own[at][: count + 1]), 0)
            for at, (row, _) in enumerate(self._owners)
            for count in range(len(own[at]))
        ]
        self._sampler.add_rows(len(self._owners), assumed)
        self._sampler.set_owners([*self._owners, *assumed])
        self._has_changed = True
        order = np.concatenate((np.flatnonzero(is_first), np.flatnonzero(~is_first)))
        adapters = self._steps.slots.adapters_of(np.repeat(np.arange(len(lengths)), lengths)[order])
        chosen = self._steps.predictions.argmax(hidden[upload(order, self._steps.device)], adapters)
        self.pending.append(self._sampler.sample(0, [chosen]))

    def settle(self, moved: Mapping[int, int]) -> None:
        """Go on from what the host has read of a step with drafts: each slot, or another as which it has gone on."""
        if moved:
            self._sampler.move_rows(np.array(list(moved)), np.array(list(moved.values())))
        (starts, lengths), positions = self._verified, self._positions()
        if self._steps.cache.states:
            self._steps.settle((positions - starts).clip(1, lengths))
        self._steps.slots.resume(np.array([row.last_token(beam) for row, beam in self._owners]), positions)

    def _positions(self) -> Array:
        """Return the position of each slot's next token; none is pending."""
        return np.array([sequence.cached for sequence, _ in self._owners])

    def clear(self, sequences: list[Sequence]) -> None:
        """Zero the cache of sequences, so that infinite numbers do not remain for the next sequences in their slots."""
        rows = [row for sequence in sequences for row in sequence.reservation.rows]
        shared = {*self._forget(sequences, is_dirty=True)}  # are cleared when all have ended
        pages = [page for row in rows for page in (*row.pages, *row.source) if page not in shared]
        self._steps.slots.clear(np.array(pages, np.int64))

    def keep(self, sequences: list[Sequence]) -> None:
        """Make the pages of sequences that are about to be freed known to later ones."""
        for sequence in sequences:
            sequence.reservation.publish()

    def forget(self, sequences: list[Sequence]) -> None:
        """Withdraw the pages of sequences that were in a failed step from the prefix cache."""
        self._forget(sequences)
        self._steps.cache.allocator.prefixes.fresh.clear()
        self._end_mixed()

    def _end_mixed(self) -> None:
        self.is_mixed, self._decoded, self._following = False, None, None

    def _forget(self, sequences: list[Sequence], is_dirty: bool = False) -> list[int]:
        """Withdraw the pages of failed sequences from the prefix cache; returns those that other rows use."""
        rows = [row for sequence in sequences for row in sequence.reservation.rows]
        pages = dict.fromkeys(page for row in rows for page in row.pages)
        for sequence in sequences:
            sequence.reservation.kept.forget()
        return self._steps.cache.allocator.prefixes.forget(pages, is_dirty)

    def drop(self, sequence: Sequence) -> None:
        """Free the pages of a sequence whose context was run in part."""
        if not all(bool(states[-1].isfinite().all()) for states in sequence.chunks):
            self.clear([sequence])
        self.free([sequence])

    def free(self, sequences: list[Sequence]) -> None:
        """Free the slots and pages of sequences, and move the last slots into the gaps."""
        if not sequences:
            return
        freed = set(sequences)
        for sequence in sequences:
            sequence.leave()
        self._sequences = [sequence for sequence in self._sequences if sequence not in freed]
        stays = np.array([sequence not in freed for sequence, _ in self._owners])
        kept = int(stays.sum())
        gaps = np.flatnonzero(~stays[:kept])
        sources = kept + np.flatnonzero(stays[kept:])
        self._steps.slots.free(len(self._owners), kept, gaps, sources)
        self._clear_dirty()
        if len(gaps):
            self._sampler.move_rows(gaps, sources)
        for gap, source in zip(gaps.tolist(), sources.tolist(), strict=True):
            self._owners[gap] = self._owners[source]
        del self._owners[kept:]
        self._assign_slots()
        if not self._sequences:
            self.pending.clear()

    def _assign_slots(self) -> None:
        slots = {sequence: [0] * sequence.width for sequence in self._sequences}
        for slot, (sequence, beam) in enumerate(self._owners):
            slots[sequence][beam] = slot
        for sequence, own in slots.items():
            sequence.join(own)
        self._has_changed = True
        self.has_drafting = any(sequence.drafting for sequence in self._sequences)
