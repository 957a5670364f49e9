"""All-reduce over GPUs that write into each other's memory: for a decode step's small tensors, faster than NCCL.

Every process has memory that the others of its stage have mapped (torch's symmetric memory; multicast is switched off
here). If memory cannot be mapped, NCCL does every all-reduce.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arrays import MOST_SLOTS
from ..ops.kernels import can_run_on
from .group import Group

_log = logging.getLogger(__name__)


class PeerMemory:
    """Mapped memory of the processes of a stage, of which this one has a rank.

    ``memory`` is this process's, int64, which the others write to: for sums first, then for the argmax. ``addresses``
    are of all processes' memory, and ``handle`` keeps it mapped.
    """

    def __init__(self, memory: Tensor, addresses: Sequence[int], rank: int, handle: Any) -> None:
        from ..ops.kernels import all_reduce as kernels

        self._kernels, self._rank, self._handle = kernels, rank, handle
        sums = len(memory) - _choice_words(len(addresses))
        self._most = sums // (2 * len(addresses))
        self._memories = memory[:sums], memory[sums:]
        tables = [addresses, [each + sums * memory.itemsize for each in addresses]]
        self._sums, self._choices = torch.tensor(tables, dtype=torch.int64, device=memory.device)
        zeros = partial(torch.zeros, dtype=torch.int32, device=memory.device)
        self._lost, self._turns, self._row_turns = zeros(1), zeros(kernels.PROGRAMS), zeros(MOST_SLOTS)
        self._aside = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]

    def has_room_for(self, part: Tensor) -> bool:
        """Return whether a tensor is small enough."""
        return part.numel() <= self._most

    def all_reduce_add(self, x: Tensor, part: Tensor) -> Tensor:
        """Add the sum of all processes' parts to x, in place; both contiguous and of one shape."""
        self._kernels.all_reduce_add(x, part, self._memories[0], self._sums, self._rank, self._turns, self._lost)
        return x

    def all_reduce_argmax(self, tokens: Tensor, ids: Tensor, logits: Tensor, first: int) -> None:
        """Replace each row's argmax of this process by that of all processes; see kernels.all_reduce."""
        memory, choices, turns = self._memories[1], self._choices, self._row_turns
        self._kernels.all_reduce_argmax(tokens, ids, logits, first, memory, choices, self._rank, turns, self._lost)

    def has_timed_out(self) -> bool:
        """Return whether a kernel has timed out waiting for another process, after which no kernel waits."""
        return bool(self._lost.item())

    def stop_waiting(self) -> None:
        """Make kernels stop waiting for a process that is lost."""
        with torch.inference_mode(), torch.cuda.stream(self._aside):  # like the memory itself; this is another thread
            self._lost.fill_(1)


def _choice_words(size: int) -> int:
    return 4 * size * MOST_SLOTS


def open_peer_memory(group: Group, device: torch.device, most: int) -> PeerMemory | None:
    """Map the memory of the other processes of a stage, for sums of ``most`` numbers; None: one of them cannot.

    Each process of the group must call this.
    """
    size = group.tensor_size
    if size == 1 or device.type != "cuda":
        return None
    others = {*range(group.stage * size, (group.stage + 1) * size)} - {group.rank}
    # torch matches the processes' memory by a counter in each process (StoreExchange). It differs for a worker that was
    # restarted, or belongs to a second engine: rank 0 would wait for ever.
    can = group.is_first and group.settings.has_peer_sums and group.ranks.is_one_host and can_run_on(device)
    can = can and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    if not group.all_reduce_min(int(can)):
        return None
    # A program that uses multicast can put the GPUs of a host out of service; nothing here needs it.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    try:
        import torch.distributed._symmetric_memory as symmetric

        memory = symmetric.empty(2 * size * most + _choice_words(size), dtype=torch.int64, device=device)
        handle: Any = symmetric.rendezvous(memory, group.neighbours)
        memory.zero_()
        offset = memory.data_ptr() - handle.buffer_ptrs[group.tensor_rank]
        peer_memory = PeerMemory(memory, [each + offset for each in handle.buffer_ptrs], group.tensor_rank, handle)
        torch.cuda.synchronize(device)
        group.control.at_loss.append(peer_memory.stop_waiting)
    except Exception as error:  # whatever the driver says
        peer_memory = None
        _log.warning("peer-memory all-reduce unavailable (%s); falling back to NCCL", error)
    return peer_memory if group.all_reduce_min(int(peer_memory is not None)) else None
