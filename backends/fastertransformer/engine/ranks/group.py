"""Processes that hold a network together: how they come together, tell each other what to do, and part.

Rank r is the tensor rank r % T of the pipeline stage r // T, as in FasterTransformer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed.PrefixStore; mypy finds it here only

from ..checkpoint.config import ModelConfig
from ..checkpoint.layouts import Share
from ..errors import EngineError
from ..settings import Settings
from .crew import Crew
from .lines import Lines
from .ranks import Ranks, Watch, first_line, meet
from .verdicts import Verdicts

_FAREWELL_S = 20.0
_WORD_S = 2.0  # more than a crew takes to see that a process has ended
# The others wait for the next step for as long as nobody asks anything; that all live is Watch's matter.
_NO_TIMEOUT = timedelta(days=3650)


class Group:
    """All processes that hold the network together; joining blocks until every one has come.

    Args:
        ranks: of this process.
        device: of this process.
        settings: of the model; rank 0 has them, and the others are given its.

    Attributes:
        ranks: of this process.
        settings: rank 0's.
        rank: of this process.
        tensor_size: processes of each stage.
        stages: of all.
        tensor_rank, stage: this process's place.
        everybody: torch's group of all.
        neighbours: torch's group of this stage.
        watch: over the others.
        verdicts: on steps that failed.
        lost: what has happened, once another process is lost and this one outlives it.
        on_loss: is called then, from any thread.
        at_loss: are called before, so that nothing here waits for a process that is gone.

    Raises:
        EngineError: their number is not tensor_para_size x pipeline_para_size, not all came in time, or this process
            is in another group.
    """

    lost = ""
    on_loss: Callable[[], None] | None = None

    def __init__(self, ranks: Ranks, device: torch.device, settings: Settings | None = None) -> None:
        if dist.is_initialized():
            raise EngineError("this process has an engine of several processes already; close that one first")
        self.ranks, self.rank, store = ranks, ranks.rank, meet(ranks)
        self._is_on_gpu, self._is_lost = device.type == "cuda", threading.Event()
        with self.loss_is_an_error("rank 0 has not said what to load"):
            if settings:
                store.set("settings", settings.to_json())
            self.settings = Settings.from_json(store.get("settings"))
        self.tensor_size, self.stages = self.settings.tensor_para_size, self.settings.pipeline_para_size
        if ranks.world_size != self.tensor_size * self.stages:
            raise EngineError(
                f"world_size ({ranks.world_size}) should equal to tensor_para_size_ * pipeline_para_size_"
                f" ({self.tensor_size} * {self.stages} here)"
            )
        self.stage, self.tensor_rank = divmod(self.rank, self.tensor_size)
        if ranks.local_size == ranks.world_size:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # on one host nobody else need reach us
        with self.loss_is_an_error("not every rank has come"):
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("group", store),
                rank=self.rank,
                world_size=ranks.world_size,
                timeout=timedelta(seconds=ranks.timeout_s),
            )
            self.watch = Watch(ranks, store)
            self.verdicts = Verdicts(PrefixStore("verdicts", store), ranks.rank, ranks.world_size)
            groups = [
                dist.new_group(list(range(first, first + self.tensor_size)), timeout=_NO_TIMEOUT)
                for first in range(0, ranks.world_size, self.tensor_size)
            ]
            self.everybody = dist.new_group(timeout=_NO_TIMEOUT)
            self._lines = Lines(ranks, PrefixStore("lines", store), store.host)
        self.neighbours = groups[self.stage]
        self.at_loss: list[Callable[[], None]] = []

    def outlive(self, crew: Crew) -> None:
        """From now on do not end with the others: where one is lost all are ended, so that nothing waits for them."""

        def end_all(problem: str) -> None:
            self.lost = problem
            self._is_lost.set()
            crew.kill()
            for release in self.at_loss:
                release()
            if self._is_on_gpu:  # what it waits for on its streams never comes
                threading.Thread(target=_abort, daemon=True).start()
            if self.on_loss:
                self.on_loss()

        self.watch.on_loss, crew.on_end = end_all, self.watch.give_up

    def learn_of_loss(self) -> str:
        """Wait a moment for word of who was lost, where that is not this process's end."""
        if self.watch.on_loss:
            self._is_lost.wait(_WORD_S)
        return self.lost

    def leave(self) -> None:
        """Part from the others, whatever becomes of them; this process can then join other groups."""
        self.watch.end()
        self._lines.close()
        farewell = threading.Thread(target=_abort if self.lost and self._is_on_gpu else _part, daemon=True)
        farewell.start()
        farewell.join(_FAREWELL_S)  # NCCL's waits for the others, which may be gone

    def share(self, config: ModelConfig) -> Share:
        """Say which part of the network this process holds; the stages have as many layers as FasterTransformer's."""
        encoder_layers = self._part(config.encoder.num_layer) if config.encoder else None
        is_first = self.stage == 0
        return Share(self._part(config.num_layer), self.tensor_rank, is_first, is_first, encoder_layers)

    def _part(self, layers: int) -> range:
        depth = -(-layers // self.stages)
        return range(layers)[self.stage * depth : (self.stage + 1) * depth]

    def agree(self, room: int) -> int:
        """Wait until every process has loaded its part; give the least that any of them names.

        Raises:
            EngineError: one of them was lost.
        """
        least = torch.tensor([room])
        with self.loss_is_an_error("another rank could not load its part"):
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.everybody)
        return int(least)

    def announce(self, message: bytes) -> None:
        """Tell all other ranks."""
        self._lines.send(message)

    def hear(self) -> bytes:
        """Wait for what rank 0 announces."""
        return self._lines.receive()

    @contextmanager
    def loss_is_an_error(self, problem: str) -> Iterator[None]:
        """Turn what torch.distributed raises into an EngineError that begins with the problem."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            me = f"rank {self.rank} of {self.ranks.world_size}"
            raise EngineError(f"{me}: {problem}: {first_line(error)}") from error


def _part() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _abort() -> None:
    """End what NCCL waits for in kernels that run, and forget all groups."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
