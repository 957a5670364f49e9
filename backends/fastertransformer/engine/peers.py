"""Sums over GPUs that write into each other's memory: for the few numbers of a decode step, faster than NCCL.

Every process has some memory that the others of its stage have mapped (torch's symmetric memory; without multicast,
which is switched off here). Where that cannot be had, NCCL makes all sums.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor

from .group import Group
from .kernels import can_run_on

_log = logging.getLogger(__name__)


class Peers:
    """The memory of the processes that share a layer.

    Args:
        memory: int64, this process's, which the others write to: two halves, in each a place for every process.
        addresses: int64 [processes], of all processes' memory, on the device.
        rank: of this process among them.
        kernel: kernels.peer_sum.add_parts.
        handle: keeps the others' memory mapped.
    """

    def __init__(self, memory: Tensor, addresses: Tensor, rank: int, kernel: Any, handle: Any) -> None:
        self._memory, self._addresses, self._rank, self._kernel, self._handle = memory, addresses, rank, kernel, handle
        self._most = len(memory) // (2 * len(addresses))
        self._state = torch.zeros(1 << 10, dtype=torch.int32, device=memory.device)

    def takes(self, part: Tensor) -> bool:
        """Say whether there is room for so many numbers."""
        return part.numel() <= self._most

    def add(self, x: Tensor, part: Tensor) -> Tensor:
        """Add the sum of all processes' parts to x, in place; both contiguous and of one shape."""
        self._kernel(x, part, self._memory, self._addresses, self._rank, self._state)
        return x


def open_peers(group: Group, device: torch.device, most: int) -> Peers | None:
    """Map the memory of the other processes of a stage; None: it cannot be done, in any of them.

    Args:
        group: of all processes; each must call this.
        device: of this process.
        most: numbers of a sum at most.
    """
    size = group.tensor_size
    if size == 1 or device.type != "cuda":
        return None
    first = group.stage * size
    can = group.settings.has_peer_sums and group.ranks.local_size == group.ranks.world_size and can_run_on(device)
    can = can and all(
        other == group.rank or torch.cuda.can_device_access_peer(device, other) for other in range(first, first + size)
    )
    if not group.agree(int(can)):
        return None
    # A program that uses multicast can put the GPUs of a host out of service; nothing here needs it.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    try:
        import torch.distributed._symmetric_memory as symmetric

        from .kernels.peer_sum import add_parts

        memory = symmetric.empty(2 * size * most, dtype=torch.int64, device=device)
        handle: Any = symmetric.rendezvous(memory, group.neighbours)
        memory.zero_()
        offset = memory.data_ptr() - handle.buffer_ptrs[group.tensor_rank]
        addresses = torch.tensor([each + offset for each in handle.buffer_ptrs], dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        peers = Peers(memory, addresses, group.tensor_rank, add_parts, handle)
        problem = ""
    except Exception as error:  # whatever the driver says
        peers, problem = None, str(error)
        _log.warning("sums are NCCL's: the GPUs' memory cannot be mapped: %s", error)
    return peers if group.agree(int(not problem)) else None
