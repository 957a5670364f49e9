"""States: what layers without keys and values keep of a row, in the place of a page for every 32 tokens.

A row has one state, whatever its length: in each such layer the last inputs of a short convolution, and the memory
that every token updates. The page allocator of rank 0 says which state a row has, from the row's begin to its end, and
a table on each device lists the states of the slots, so that nothing is copied when rows move. A row that begins at
position 0 begins with zeros, whatever is in its state: nothing needs to be cleared. One that begins with what the
prefix cache has begins with a copy of a state that was kept behind that, see state_pool.py.

State 0 belongs to no row: slots that are free have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..arrays import MOST_SLOTS, Array, upload
from .page_pool import RowPages

LEAST_STATES = 2  # of a row in the batch, and of one that is half run
_PART = 2  # of the cache's memory, states take a half at most
_BYTES = 4  # of a number: fp32, as transformers computes them in any format


class StateShape(NamedTuple):
    """What a layer keeps of a row, in this process.

    Attributes:
        channels: of the convolution.
        past: tokens before its own that the convolution sees.
        memory: shape of the memory, heads first.
    """

    channels: int
    past: int
    memory: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes."""
        return _BYTES * (self.channels * self.past + torch.Size(self.memory).numel())


class LayerState(NamedTuple):
    """The states of one layer.

    Attributes:
        past: fp32 [states, tokens, channels]: the convolution's last inputs.
        memory: fp32 [states, ...].
    """

    past: Tensor
    memory: Tensor


class States:
    """The states of all rows.

    Args:
        shapes: of each layer of this process; None: it keeps keys and values alone, or nothing.
        count: of states.
        device: of the memory.

    Attributes:
        count: see above.
        row_bytes: that a row takes in all layers.
        layers: the states of each layer.
        of_slots: int64 [MOST_SLOTS + 1], on the device: the state of each slot.
    """

    def __init__(self, shapes: Sequence[StateShape | None], count: int, device: torch.device) -> None:
        self.count, self.row_bytes = count, bytes_of(shapes)
        self.layers = [shape and _allocated(shape, count + 1, device) for shape in shapes]
        self.of_slots = torch.zeros(MOST_SLOTS + 1, dtype=torch.long, device=device)
        self._parts: dict[int, list[Tensor]] = {}  # of states that were copied

    @property
    def size_bytes(self) -> int:
        """Bytes of all states, that of free slots too."""
        return (self.count + 1) * self.row_bytes

    def place(self, first: int, states: Array) -> None:
        """Note the states of the slots from ``first`` on, and copy to them what they begin with; see states_of."""
        own, origins = states
        self.of_slots[first : first + len(own)] = upload(own, self.of_slots.device)
        if origins.any():
            self.copy(states[:, origins > 0])

    def copy(self, states: Array) -> None:
        """Copy states to others, int64 [2 (target, source), n]; all are read before any is written.

        It is one operation on a device, whatever the number of layers, and nothing waits for it.
        """
        targets, sources = ([part for state in some for part in self._parts_of(state)] for some in states.tolist())
        if np.isin(*states).any():
            sources = [part.clone() for part in sources]
        if targets:  # a stage may have no such layer
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def _parts_of(self, state: int) -> list[Tensor]:
        if state not in self._parts:
            self._parts[state] = [part[state] for layer in self.layers if layer for part in layer]
        return self._parts[state]

    def copy_slots(self, to: Tensor, of: Tensor) -> None:
        """Copy the states of slots to those of others, int64 [n] each; all are read before any is written."""
        targets, sources = self.of_slots[to], self.of_slots[of]
        for layer in filter(None, self.layers):
            for part in layer:
                part[targets] = part[sources]


def choose_count(shapes: Sequence[StateShape | None], budget_bytes: int, keeps_prefixes: bool) -> int:
    """Choose how many states there are; below LEAST_STATES: the memory has room for too few."""
    row_bytes = bytes_of(shapes)  # none in a process whose layers keep none
    most = MOST_SLOTS + 1 + MOST_SLOTS * keeps_prefixes
    return min(most, budget_bytes // _PART // row_bytes - 1) if row_bytes else most


def states_of(rows: Sequence[RowPages]) -> Array:
    """Return the states of rows that get slots, and those that they begin with from now on; int64 [2, rows]."""
    states = np.array([(row.state, row.origin) for row in rows]).T
    for row in rows:
        row.origin = 0
    return states


def bytes_of(shapes: Sequence[StateShape | None]) -> int:
    """Return the bytes that a row takes in all layers."""
    return sum(shape.row_bytes for shape in shapes if shape)


def _allocated(shape: StateShape, count: int, device: torch.device) -> LayerState:
    """Allocate a layer's memory; a host finds it when it is written to."""
    past = torch.empty(count, shape.past, shape.channels, device=device)
    return LayerState(past, torch.empty(count, *shape.memory, device=device))
