"""The process group that holds a network: joining, partitioning, and shutdown.

Rank r is the tensor rank r % T of the pipeline stage r // T, as in FasterTransformer.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed.TCPStore; mypy finds it here only

from ..errors import EngineError
from ..settings import Settings
from .control import ControlChannel
from .handshake import LOOPBACK
from .partition import Partition
from .rank import Ranks
from .workers import WorkerProcesses

_SHUTDOWN_S = 20.0
_NO_TIMEOUT = timedelta(days=3650)  # of a step: the control channel detects ranks that are lost
_group_numbers = itertools.count()  # of the groups that this process has begun as rank 0
_ending = threading.Lock()


class Group:
    """All processes that hold the network together; joining blocks until every one has joined.

    Args:
        ranks: of this process.
        device: of this process.
        settings: of the model, in rank 0; None in the other ranks, which receive rank 0's.
        workers: the other processes, if this process has started them.

    Attributes:
        is_first: whether this is the first group that rank 0's process has begun.
        tensor_size, stages: the processes of each pipeline stage, and the number of stages.
        rank, tensor_rank, stage: of this process.
        neighbours: torch's group of this stage; its default group is of all stages.
        control: messages and heartbeats between rank 0 and the others.

    Raises:
        EngineError: the number of processes is not tensor_para_size x pipeline_para_size, not all have joined in time,
            or this process is in another group.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        settings: Settings | None = None,
        workers: WorkerProcesses | None = None,
    ) -> None:
        if dist.is_initialized():
            raise EngineError("this process has an engine of several processes already; close that one first")
        self.ranks, self.rank, self._is_on_gpu = ranks, ranks.rank, device.type == "cuda"
        store, startup_message = None, ""
        if settings:
            _check_size(ranks, settings)
            store = _open_store()
            startup_message = json.dumps([store.port, next(_group_numbers), settings.to_json()])
        check = workers.check if workers else lambda: None
        self.control = ControlChannel(ranks, startup_message.encode(), check, store.port if store else 0)
        port, number, said = json.loads(self.control.startup_message)
        self.is_first, self.settings = number == 0, Settings.from_json(said)
        self.tensor_size, self.stages = self.settings.tensor_para_size, self.settings.pipeline_para_size
        self.stage, self.tensor_rank = divmod(self.rank, self.tensor_size)
        try:
            with self.loss_is_an_error("not every rank has come"):
                store = store or TCPStore(LOOPBACK, self.control.store_port or port, wait_for_workers=False)
                self._join(device, store)
        except BaseException:
            self.control.close()
            raise

    def _join(self, device: torch.device, store: TCPStore) -> None:
        store.set_timeout(timedelta(seconds=self.ranks.timeout_s))
        backend = "gloo"
        if self.ranks.is_one_host:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no other interface is needed
        if self._is_on_gpu:
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
            # Otherwise torch ends this process when another is lost, even one that restarts its workers.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        size = self.ranks.world_size
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=size, timeout=_NO_TIMEOUT)
        assert dist.group.WORLD
        self.neighbours: dist.ProcessGroup = dist.group.WORLD
        if self.stages > 1:
            self.neighbours, _ = dist.new_subgroups(self.tensor_size, timeout=_NO_TIMEOUT)  # type: ignore[no-untyped-call]

    def survive_losses(self, workers: WorkerProcesses) -> None:
        """Survive the loss of a worker: kill the other workers and abort NCCL instead of exiting."""
        self.control.at_loss.append(workers.kill)
        if self._is_on_gpu:  # its streams would wait for ever
            self.control.at_loss.append(threading.Thread(target=_end, args=(True,), daemon=True).start)
        self.control.is_fatal = False

    def close(self) -> None:
        """Leave the process group, whatever the others do; this process can then join another."""
        self.control.close()
        is_abort = bool(self.control.lost) and self._is_on_gpu
        ending = threading.Thread(target=_end, args=(is_abort,), daemon=True)
        ending.start()
        ending.join(_SHUTDOWN_S)  # NCCL waits for the others, which may be gone

    def partition(self, layers: int, encoder_layers: int = 0) -> Partition:
        """Return this process's part of a network of that many layers, and of that many of an encoder if it has one."""
        encoder = self.part_of(encoder_layers) if encoder_layers else None
        is_first = self.stage == 0
        return Partition(self.part_of(layers), self.tensor_rank, is_first, is_first, encoder)

    def part_of(self, layers: int) -> range:
        """Return this stage's layers of a stack; they are divided over stages as in FasterTransformer."""
        depth = -(-layers // self.stages)
        return range(layers)[self.stage * depth : (self.stage + 1) * depth]

    def all_reduce_min(self, number: int) -> int:
        """Return the minimum of all processes' numbers; raises an EngineError if a process was lost while loading."""
        least = torch.tensor([number])
        with self.loss_is_an_error("another rank could not load its part"):
            dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    @contextmanager
    def loss_is_an_error(self, problem: str) -> Iterator[None]:
        """Turn an exception of torch.distributed into an EngineError that begins with the problem."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            me = f"rank {self.rank} of {self.ranks.world_size}"
            raise EngineError(f"{me}: {problem}: {first_line(error)}") from error


def _check_size(ranks: Ranks, settings: Settings) -> None:
    if ranks.world_size != settings.world_size:
        raise EngineError(
            f"world_size ({ranks.world_size}) should equal to tensor_para_size_ * pipeline_para_size_"
            f" ({settings.tensor_para_size} * {settings.pipeline_para_size} here)"
        )


def _open_store() -> TCPStore:
    """Open the store through which torch's processes find each other, on a free port of loopback."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def first_line(error: Exception) -> str:
    """Return an error's message without the stack that torch appends."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _end(is_abort: bool) -> None:
    """Destroy all groups of torch, or abort them and NCCL's running kernels."""
    with _ending:
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group() if is_abort else dist.destroy_process_group()
