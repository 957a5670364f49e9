"""Keys and values of all sequences in flight, within a byte budget.

A slot belongs to one row: a sequence, or one beam of it. The rows that decode fill the first slots; that is the
scheduler's care. So on a CPU what a step reads is a view of the first B slots and nothing is gathered. Memory is one
block a layer, which lets it grow with one layer's worth of copies at a time. A GPU has pages instead: see pages.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import EngineError
from ..requests.request import Array
from .attention import SlotCells, Slots

Need = tuple[int, int, int]  # of a sequence: rows, entries of each, entries of what the encoder makes

MOST_SLOTS = 1024  # so that what a step needs to know of each can have its place once and for all
UNBOUNDED = 1 << 31  # window of a slot that keeps every token
_CAPACITY_STEP = 32  # tokens: capacity is a multiple, so that it seldom grows
_STAGED_BYTES = 1 << 15  # the driver copies so much aside by itself; more of it would wait for the GPU
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class CacheShape:
    """What one process caches.

    Attributes:
        layers: that this process holds.
        head_num: key and value heads of each that this process holds.
        size_per_head: width of one.
        dtype: number format of keys and values.
        has_cross: whether each slot also keeps the keys and values of an encoder's output.
    """

    layers: int
    head_num: int
    size_per_head: int
    dtype: torch.dtype
    has_cross: bool = False

    @property
    def token_bytes(self) -> int:
        """Of the keys and values of one token."""
        return self.layers * 2 * self.head_num * self.size_per_head * self.dtype.itemsize

    def bytes_for(self, slots: int, capacity: int, cross_capacity: int = 0) -> int:
        """Of so many slots with so many tokens each."""
        return slots * self.token_bytes * (capacity + (cross_capacity if self.has_cross else 0))


class KvCache:
    """Keys and values by layer and slot.

    The entry of the token at position p of a row is p % window of its slot; so a slot with a window keeps the last
    tokens only, and its valid entries are the first min(p + 1, window). Slots without one have window UNBOUNDED.

    Args:
        shape: of one token and of the layers.
        device: where they live.
        budget_bytes: that the blocks may take.

    Attributes:
        memory: a layer each: [2 (k, v), slots, H, capacity, D].
        cross_memory: likewise for the encoder's output: [2, slots, H, cross_capacity, D]; empty without an encoder.
        windows: int64 [MOST_SLOTS], on the device.
        sources: int64 [2, MOST_SLOTS], on the device; see no_sources.
        slots, capacity, cross_capacity: present sizes; capacity is of every slot.
    """

    def __init__(self, shape: CacheShape, device: torch.device, budget_bytes: int) -> None:
        self.shape, self.budget_bytes = shape, budget_bytes
        self.slots = self.capacity = self.cross_capacity = 0
        self._device = device
        self.memory = [self._block(0, 0) for _ in range(shape.layers)]
        self.cross_memory = [self._block(0, 0) for _ in range(shape.layers if shape.has_cross else 0)]
        self.windows = torch.full((MOST_SLOTS,), UNBOUNDED, device=device)
        self.sources = no_sources(device)

    def _block(self, slots: int, capacity: int) -> Tensor:
        # Zeros, not empty: a masked entry is multiplied by 0, and 0 times a leftover NaN is NaN.
        size = (2, slots, self.shape.head_num, capacity, self.shape.size_per_head)
        return torch.zeros(size, dtype=self.shape.dtype, device=self._device)

    def bytes_of(self, needs: Iterable[Need]) -> int:
        """Say what sequences take that are in the cache together."""
        rows, entries, cross = zip(*needs, strict=True)
        return self.shape.bytes_for(sum(rows), max(entries), max(cross))

    def fits(self, slots: int, capacity: int, cross_capacity: int = 0) -> bool:
        """Say whether so many slots of so many tokens are within the budget."""
        return self.shape.bytes_for(slots, capacity, cross_capacity) <= self.budget_bytes

    def reserve(self, slots: int, capacity: int, cross_capacity: int = 0, kept: int = 0) -> None:
        """Have at least so many slots of at least so many tokens; the first ``kept`` slots keep their content.

        Raises:
            EngineError: that is over the budget.
        """
        if slots <= self.slots and capacity <= self.capacity and cross_capacity <= self.cross_capacity:
            return
        wanted = (slots, capacity, cross_capacity)
        if not self.fits(*wanted):
            need = self.shape.bytes_for(*wanted)
            raise EngineError(
                f"{slots} rows of {capacity} tokens need {need} bytes of KV cache, over {self.budget_bytes}"
            )
        now = (self.slots, self.capacity, self.cross_capacity)
        steps = (1 << (slots - 1).bit_length() if slots > self.slots else slots, *map(_rounded, wanted[1:]))
        generous = tuple(map(max, steps, now))
        chosen = next(size for size in (generous, steps, wanted) if self.fits(*size))
        self.slots, self.capacity, self.cross_capacity = chosen
        for blocks, size in ((self.memory, self.capacity), (self.cross_memory, self.cross_capacity)):
            for layer, old in enumerate(blocks):
                if not kept:
                    blocks[layer] = self._block(0, 0)  # frees the old block before the new one
                new = self._block(self.slots, size)
                both = min(size, old.shape[3])
                new[:, :kept, :, :both] = old[:, :kept, :, :both]
                blocks[layer] = new

    def place(
        self, first: int, needs: Array, windows: Array, sources: Array, saved: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """Give the slots from ``first`` on to new rows.

        Args:
            first: slot; those before it keep what they have.
            needs: int64 [n], entries of each.
            windows: int64 [n].
            sources: int64 [n], entries of what the encoder makes; 0: there is none.
            saved: what some of the slots begin with; see save.

        Raises:
            EngineError: that is over the budget.
        """
        end = first + len(needs)
        self.reserve(end, int(needs.max()), int(sources.max()), first)
        self.windows[first:end] = upload(windows, self._device)
        for slot, content in saved.items():
            self.restore(slot, content)

    def leave(self, count: int, kept: int, targets: Array, sources: Array, length: int) -> None:
        """Free slots.

        Args:
            count: slots in use.
            kept: slots in use afterwards.
            targets: int64 [n], slots that others move to.
            sources: int64 [n], those.
            length: entries of each that matter.
        """
        if len(targets):
            self.copy(targets, sources, min(length, self.capacity))

    def cells(self, slots: Slots) -> SlotCells:
        """Say where rows keep their keys and values."""
        return SlotCells(slots)

    def source_cells(self, slots: Slots) -> SlotCells:
        """Say where rows keep those of what the encoder has made, in cross_memory."""
        return SlotCells(slots)

    def copy(self, targets: Sequence[int] | Array, sources: Sequence[int] | Array, length: int) -> None:
        """Overwrite slots with what the first ``length`` entries of others hold; all are read before any is written."""
        to, of = upload(np.array((targets, sources)), self._device)
        for block in self.memory:
            block[:, to, :, :length] = block[:, of, :, :length]
        for block in self.cross_memory:
            block[:, to] = block[:, of]
        self.windows[to], self.sources[:, to] = self.windows[of], self.sources[:, of]

    def wipe(self, slots: Array) -> None:
        """Fill slots with zeros, as new ones are; see _block."""
        for block in (*self.memory, *self.cross_memory):
            block[:, upload(slots, self._device)] = 0

    def bytes_of_saved(self, entries: int) -> int:
        """Say what a row takes that is saved."""
        return entries * self.shape.token_bytes

    def save(self, slot: int, length: int) -> list[Tensor]:
        """Copy the first ``length`` entries of a slot out of the cache, [2, H, length, D] a layer."""
        return [block[:, slot, :, :length].clone() for block in self.memory]

    def forget(self, saved: Sequence[Tensor]) -> None:
        """Drop what was saved, which has its own memory."""

    def restore(self, slot: int, saved: Sequence[Tensor]) -> None:
        """Put back what save gave."""
        for block, content in zip(self.memory, saved, strict=True):
            block[:, slot, :, : content.shape[2]] = content


def no_sources(device: torch.device) -> Tensor:
    """Give the length of what each slot's encoder was given, 1 where there is nobody, and the IA3 task, -1 for none."""
    return torch.tensor([[1], [-1]], device=device).repeat(1, MOST_SLOTS)


def upload(array: Array, device: torch.device) -> Tensor:
    """Copy to a device without waiting for what it is doing."""
    content = torch.from_numpy(array)
    if device.type == "cuda" and array.nbytes > _STAGED_BYTES:
        content = content.pin_memory()
    return content.to(device, non_blocking=True)


def _rounded(capacity: int) -> int:
    return -(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP


def free_bytes(device: torch.device) -> int:
    """Memory that a device has free: of a GPU as its driver says, of the host as far as the cgroup lets us."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + _unused_bytes(device)
    available = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")]
    for line in _MEMINFO.read_text().splitlines() if _MEMINFO.exists() else []:
        if line.startswith("MemAvailable:"):
            available = [int(line.split()[1]) << 10]
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text())
            lines = (_CGROUP / "memory.stat").read_text().splitlines()
            counts = {name: int(count) for name, count in (line.split() for line in lines)}
            # What is cached of files, mapped shards above all, makes room when it is needed.
            available.append(int(limit) - used + counts.get("active_file", 0) + counts.get("inactive_file", 0))
    except (OSError, ValueError):
        pass  # no cgroup v2 here
    return max(0, min(available))


def _unused_bytes(device: torch.device) -> int:
    """What torch holds of a GPU's memory without using it."""
    return int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
