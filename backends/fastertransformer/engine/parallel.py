"""A network spread over several processes: tensor and pipeline parallelism through torch.distributed.

Rank r is the tensor rank r % T of the pipeline stage r // T, as in FasterTransformer. The processes of a stage hold its
layers; each has its shard of every matrix, computes with its own heads, and the two products that lead back into the
residual stream are summed over the stage (``mlp.dense_4h_to_h``, ``attention.dense``). What a stage has made goes to
the next, and from the last one back to rank 0, which alone samples.

Rank 0 generates as if it were alone (see steps.py): its ``Leader`` announces every step to the others, which take the
same one in ``follow``. Nothing but the steps is sent: the others know neither requests nor sampling.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore  # torch.distributed.PrefixStore; mypy finds it here only

from .cache import KvCache
from .config import GptConfig
from .errors import EngineError
from .network import Links, Network
from .ranks import Ranks, Watch, first_line, meet
from .request import Array
from .steps import Steps
from .weights import Share

_BEGIN, _PREFILL, _DECODE, _MOVE, _CLOSE = range(5)
_HEADER_SIZE = 4
_OUT_OF_STEP = "another rank is lost, or a step failed"
# Followers wait for the next step for as long as nobody asks anything; that others live is Watch's matter.
_NO_TIMEOUT = timedelta(days=3650)


class Group:
    """All processes that hold the network together; joining blocks until every one has come.

    Args:
        ranks: of this process.
        tensor_para_size: T.
        pipeline_para_size: stages.
        device: of this process.

    Raises:
        EngineError: their number is not T x stages, or not all came in time.
    """

    def __init__(self, ranks: Ranks, tensor_para_size: int, pipeline_para_size: int, device: torch.device) -> None:
        if ranks.world_size != tensor_para_size * pipeline_para_size:
            raise EngineError(
                f"world_size ({ranks.world_size}) should equal to tensor_para_size_ * pipeline_para_size_"
                f" ({tensor_para_size} * {pipeline_para_size} here)"
            )
        self.ranks = ranks
        self._stages = pipeline_para_size
        self._tensor_para_size = tensor_para_size
        self.stage, self.tensor_rank = divmod(ranks.rank, tensor_para_size)
        store = meet(ranks)
        if ranks.local_size == ranks.world_size:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # on one host nobody else need reach us
        with self.loss_is_an_error("not every rank has come"):
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("group", store),
                rank=ranks.rank,
                world_size=ranks.world_size,
                timeout=timedelta(seconds=ranks.timeout_s),
            )
            self.watch = Watch(ranks, store)
            groups = [
                dist.new_group(list(range(first, first + tensor_para_size)), timeout=_NO_TIMEOUT)
                for first in range(0, ranks.world_size, tensor_para_size)
            ]
            self._everybody = dist.new_group(timeout=_NO_TIMEOUT)
        self._tensor_group = groups[self.stage]

    def share(self, config: GptConfig) -> Share:
        """Say which part of the network this process holds; the stages have as many layers as FasterTransformer's."""
        depth = -(-config.num_layer // self._stages)
        layers = range(config.num_layer)[self.stage * depth : (self.stage + 1) * depth]
        return Share(layers, self.tensor_rank, embeds=self.stage == 0, predicts=self.ranks.rank == 0)

    def links(self, config: GptConfig, dtype: torch.dtype, device: torch.device) -> Links:
        """Connect this process's part of the network to the others."""
        return _ProcessLinks(self, config.hidden_units, dtype, device)

    def wait_until_loaded(self) -> None:
        """Wait for every process.

        Raises:
            EngineError: one of them was lost.
        """
        with self.loss_is_an_error("another rank could not load its part"):
            dist.all_reduce(torch.zeros(1), group=self._everybody)

    def reduce(self, part: Tensor) -> None:
        """Sum over the processes of this stage, in place."""
        if self._tensor_para_size > 1:
            dist.all_reduce(part, group=self._tensor_group)

    def send(self, x: Tensor, rank: int) -> None:
        """Send to another process."""
        dist.send(x.contiguous(), rank, group=self._everybody)

    def receive(self, x: Tensor, rank: int) -> None:
        """Receive what it sends."""
        dist.recv(x, rank, group=self._everybody)

    def broadcast(self, values: Tensor) -> Tensor:
        """Give rank 0's values to all: int64 on the CPU, in place."""
        dist.broadcast(values, 0, group=self._everybody)
        return values

    @property
    def previous(self) -> int | None:
        """The rank that this one receives from; None in the first stage."""
        return self.ranks.rank - self._tensor_para_size if self.stage else None

    @property
    def next(self) -> int | None:
        """The rank that this one sends to; None in the last stage."""
        return self.ranks.rank + self._tensor_para_size if self.stage < self._stages - 1 else None

    @property
    def last(self) -> int:
        """The rank that sends the network's result to rank 0."""
        return (self._stages - 1) * self._tensor_para_size

    @contextmanager
    def loss_is_an_error(self, problem: str) -> Iterator[None]:
        """Turn what torch.distributed raises into an EngineError that begins with the problem."""
        try:
            yield
        except RuntimeError as error:
            me = f"rank {self.ranks.rank} of {self.ranks.world_size}"
            raise EngineError(f"{me}: {problem}: {first_line(error)}") from error


class _ProcessLinks(Links):
    """Links to the processes of a group."""

    def __init__(self, group: Group, hidden_units: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._hidden_units, self._dtype, self._device = group, hidden_units, dtype, device

    def enter(self, embed: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Embed in the first stage, receive in the others."""
        if self._group.previous is None:
            return embed()
        x = torch.empty((*shape, self._hidden_units), dtype=self._dtype, device=self._device)
        self._group.receive(x, self._group.previous)
        return x

    def reduce(self, part: Tensor) -> Tensor:
        """Sum over the stage."""
        self._group.reduce(part)
        return part

    def leave(self, x: Tensor) -> Tensor:
        """Send to the next stage, from the last one to rank 0; what rank 0 returns is the last stage's."""
        group = self._group
        if group.next is not None:
            group.send(x, group.next)
            if group.ranks.rank == 0:
                group.receive(x, group.last)
        elif group.stage and group.tensor_rank == 0:
            group.send(x, 0)
        return x


class Leader(Steps):
    """Rank 0's steps: each is announced, then taken.

    Any error leaves the processes out of step with each other, so it ends them all.
    """

    def __init__(self, model: Network, cache: KvCache, group: Group) -> None:
        super().__init__(model, cache)
        self._group = group

    def begin(self, rows: int, length: int) -> None:
        """See Steps."""
        with self._together():
            self._announce(_BEGIN, rows, length)
            super().begin(rows, length)

    def prefill(self, ids: Tensor, first: int) -> Tensor:
        """See Steps."""
        with self._together():
            self._announce(_PREFILL, *ids.shape, first, content=ids)
            return super().prefill(ids, first)

    def decode(self, ids: Tensor, lengths: Array) -> Tensor:
        """See Steps."""
        with self._together():
            self._announce(_DECODE, 2, len(ids), content=torch.stack((ids.cpu(), torch.from_numpy(lengths))))
            return super().decode(ids, lengths)

    def move(self, places: Sequence[int], sources: Sequence[int]) -> None:
        """See Steps."""
        with self._together():
            self._announce(_MOVE, 2, len(places), content=torch.tensor((places, sources)))
            super().move(places, sources)

    def close(self) -> None:
        """Send the other processes home."""
        self._group.watch.end()
        self._announce(_CLOSE)

    def _announce(self, kind: int, *sizes: int, content: Tensor | None = None) -> None:
        header = (kind, *sizes, *(0,) * (_HEADER_SIZE - 1 - len(sizes)))
        self._group.broadcast(torch.tensor(header))
        if content is not None:
            self._group.broadcast(content.cpu().contiguous())

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._group.watch.give_up(f"{_OUT_OF_STEP}: {first_line(error)}")
            raise


def follow(steps: Steps, group: Group) -> None:
    """Take every step that rank 0 announces, until it sends us home.

    Raises:
        EngineError: rank 0 or another process was lost, or a step failed.
    """
    with group.loss_is_an_error(_OUT_OF_STEP), torch.inference_mode():
        _take_steps(steps, group)


def _take_steps(steps: Steps, group: Group) -> None:
    while True:
        kind, *sizes = group.broadcast(torch.zeros(_HEADER_SIZE, dtype=torch.long)).tolist()
        if kind == _CLOSE:
            group.watch.end()
            return
        if kind == _BEGIN:
            steps.begin(sizes[0], sizes[1])
            continue
        content = group.broadcast(torch.zeros(sizes[0], sizes[1], dtype=torch.long))
        if kind == _PREFILL:
            steps.prefill(content.to(steps.device), sizes[2])
        elif kind == _DECODE:
            steps.decode(content[0].to(steps.device), np.ascontiguousarray(content[1].numpy()))
        else:
            steps.move(content[0].tolist(), content[1].tolist())
