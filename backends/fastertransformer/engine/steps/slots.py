"""What all processes know of the rows in their slots: pages, next input token and position, kept on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ..arrays import MOST_SLOTS, UNBOUNDED, Array, upload
from ..cache.kv_cache import KvCache, table_of
from ..cache.page_allocator import pages_of
from ..cache.page_pool import RowPages
from ..cache.states import states_of
from ..model.network import Network
from ..model.prefixes import Prefix
from .collective import Collective, collective_step


class RowSlots(Collective):
    """The slots of one process: rows are placed in them, moved, copied and freed.

    Args:
        network: all of it, or this process's part.
        cache: of this process.
        prefixes: of this process's layers and heads, by task.
        places: of adapters on the device.

    Attributes:
        ids: int64 [MOST_SLOTS], on the device: the next input token of each slot.
        positions: int64 [MOST_SLOTS], on the device: the position of that token.
        count: slots in use, which are the first ones.
        adapters: int64 [MOST_SLOTS + 1], on the device: the place of each slot's adapter; ``places``: it has none.
    """

    def __init__(self, network: Network, cache: KvCache, prefixes: Sequence[Prefix] = (), places: int = 0) -> None:
        self.network, self.cache, self._prefixes = network, cache, prefixes
        self.device = network.weights.like.device
        self.ids, self.positions = torch.zeros(2, MOST_SLOTS, dtype=torch.long, device=self.device)
        self.count = 0
        self._places, self._adapters = places, np.full(MOST_SLOTS + 1, places)
        self.adapters = upload(self._adapters, self.device)

    def allocate(
        self,
        first: int,
        rows: Sequence[RowPages],
        positions: Array,
        windows: Array | None = None,
        tasks: Array | None = None,
        ids: Array | None = None,
        adapters: Array | None = None,
    ) -> None:
        """Allocate the slots from ``first`` on to new rows; arrays are int64 [n].

        Args:
            first: slot; the slots before it are unchanged.
            rows: their pages.
            positions: of each row's first token after its context.
            windows: how many tokens each row keeps; None: all.
            tasks: whose prefix each row begins with; -1, or None: no prefix.
            ids: next input token of rows that begin with a decode step; None: contexts are run first.
            adapters: the place of each row's adapter; -1, or None: it has none.
        """
        most = np.full(len(rows), UNBOUNDED) if windows is None else windows
        tables, source_tables = table_of([row.listed for row in rows]), table_of([row.source for row in rows])
        self.place(first, tables, source_tables, positions, most, tasks, ids, states_of(rows), adapters)

    @collective_step
    def place(
        self,
        first: int,
        tables: Array,
        source_tables: Array,
        positions: Array,
        windows: Array,
        tasks: Array | None,
        ids: Array | None,
        states: Array,
        adapters: Array | None = None,
    ) -> None:
        """Write the page tables, int32 [n, pages], and the state of new rows; see allocate."""
        self.cache.place(first, tables, source_tables, windows, states)
        self.count = first + len(tables)
        self.positions[first : first + len(tables)] = upload(positions, self.device)
        if ids is not None:
            self.ids[first : first + len(tables)] = upload(ids, self.device)
        if self._places:
            own = self._adapters[first : first + len(tables)]
            own[:] = self._places if adapters is None else np.where(adapters < 0, self._places, adapters)
            self.adapters[first : first + len(tables)] = upload(own.copy(), self.device)
        for row, task in enumerate(() if tasks is None else tasks.tolist()):
            if task >= 0:
                self.cache.restore(tables[row], self._prefixes[task])

    @collective_step
    def update(self, changes: Array) -> None:
        """Write pages to page tables: slot, column and page of each, int64 [3, n]."""
        self.cache.update(changes)

    @collective_step
    def free(self, count: int, kept: int, targets: Array, sources: Array) -> None:
        """Free slots, and move others into the gaps.

        Args:
            count: slots in use.
            kept: slots in use afterwards.
            targets: int64 [n], slots that others move to.
            sources: int64 [n], the slots that move.
        """
        self.cache.free(count, kept, targets, sources)
        self.count = kept
        if len(targets):
            to, of = upload(np.stack((targets, sources)), self.device)
            self.ids[to], self.positions[to] = self.ids[of], self.positions[of]
            if self._places:
                self.adapters[to] = self.adapters[of]
                self._adapters[targets] = self._adapters[sources]

    def adapters_of(self, slots: Array | slice) -> Array | None:
        """Return the places of the slots' adapters as the host knows them; None: no slot has any."""
        if not self._places:
            return None
        found: Array = self._adapters[slots]
        return found if (found < self._places).any() else None

    @contextmanager
    def hidden(self, first: int, end: int) -> Iterator[None]:
        """Make the rows in the slots from ``first`` to ``end`` look like free ones to the device for a while."""
        slots = slice(first, min(end, self.count))
        state = [self.ids[slots], self.positions[slots], self.cache.page_tables[slots]]
        state += [self.cache.states.of_slots[slots]] if self.cache.states else []
        before = [part.clone() for part in state] if slots.stop > first else []
        for part in state[: len(before)]:
            part.zero_()
        yield
        for part, content in zip(state, before, strict=False):
            part.copy_(content)

    @collective_step
    def resume(self, ids: Array, positions: Array) -> None:
        """Set next input token and position, int64 [n], of the first slots."""
        known = upload(np.stack((ids, positions)), self.device)
        self.ids[: len(ids)], self.positions[: len(ids)] = known

    def set_tokens(self, first: int, tokens: Tensor) -> None:
        """Set the next input tokens, [N], of the slots from ``first`` on, in all processes."""
        self.ids[first : first + len(tokens)] = tokens
        self.broadcast_tokens(first, first + len(tokens))

    @collective_step
    def broadcast_tokens(self, first: int, end: int) -> None:
        """Broadcast rank 0's next input tokens of slots."""
        self.network.comm.broadcast(self.ids[first:end])

    def copy(self, targets: Sequence[RowPages], sources: Sequence[RowPages], length: int) -> None:
        """Copy the first ``length`` entries of rows, and their encoders' output, to others; see KvCache.copy."""
        count = pages_of(length)
        both = [[page for row in rows for page in (*row.pages[:count], *row.source)] for rows in (targets, sources)]
        pages = [pair for pair in zip(*both, strict=True) if pair[0] != pair[1]]  # rows may share pages
        slots = np.array([[row.slot for row in rows] for rows in (targets, sources)])
        self.copy_pages(np.array(pages, np.int64).reshape(-1, 2).T, slots)

    @collective_step
    def copy_pages(self, pages: Array, slots: Array) -> None:
        """Copy pages, int64 [2 (target, source), n], and what slots have of their encoder inputs, likewise."""
        self.cache.copy(pages, slots)

    @collective_step
    def copy_states(self, states: Array) -> None:
        """Copy states to others, int64 [2 (target, source), n]; see States.copy."""
        assert self.cache.states
        self.cache.states.copy(states)

    @collective_step
    def clear(self, pages: Array) -> None:
        """Zero pages, int64 [n], so that no non-finite number stays in them."""
        self.cache.clear(pages)
