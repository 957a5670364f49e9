"""A network spread over several processes: tensor and pipeline parallelism through torch.distributed.

Rank r is the tensor rank r % T of the pipeline stage r // T, as in FasterTransformer. The processes of a stage hold its
layers; each has its shard of every matrix, computes with its own heads, and the two products that lead back into the
residual stream are summed over the stage (``mlp.dense_4h_to_h``, ``attention.dense``). What a stage has made goes to
the next, and from the last one back to rank 0, which alone samples.

Rank 0 generates as if it were alone (see steps.py): its ``Leader`` announces every step to the others, which take the
same one in ``follow``. Nothing but the steps is sent, as numbers: the others know neither requests nor sampling.
"""

from __future__ import annotations

import marshal
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore  # torch.distributed.PrefixStore; mypy finds it here only

from .config import ModelConfig
from .errors import EngineError, GroupLostError
from .layouts import Share
from .network import Links, Network
from .pages import Cache
from .prefixes import Prefix
from .ranks import Ranks, Watch, first_line, meet
from .settings import Settings
from .steps import STEP_NAMES, Steps

_CLOSE = -1  # a step's number is its place in STEP_NAMES
_FIRST_BYTES = 4096  # of a message, its length in front of it; a longer one takes a second broadcast
_LENGTH_BYTES = 8
_FAREWELL_S = 20.0
_OUT_OF_STEP = "another rank is lost, or a step failed"
# Followers wait for the next step for as long as nobody asks anything; that others live is Watch's matter.
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
        watch: over the others.

    Raises:
        EngineError: their number is not tensor_para_size x pipeline_para_size, not all came in time, or this process
            is in another group.
    """

    def __init__(self, ranks: Ranks, device: torch.device, settings: Settings | None = None) -> None:
        if dist.is_initialized():
            raise EngineError("this process has an engine of several processes already; close that one first")
        self.ranks, store = ranks, meet(ranks)
        with self.loss_is_an_error("rank 0 has not said what to load"):
            if settings:
                store.set("settings", settings.to_json())
            self.settings = Settings.from_json(store.get("settings"))
        self._tensor_para_size, self._stages = self.settings.tensor_para_size, self.settings.pipeline_para_size
        if ranks.world_size != self._tensor_para_size * self._stages:
            raise EngineError(
                f"world_size ({ranks.world_size}) should equal to tensor_para_size_ * pipeline_para_size_"
                f" ({self._tensor_para_size} * {self._stages} here)"
            )
        self.stage, self.tensor_rank = divmod(ranks.rank, self._tensor_para_size)
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
                dist.new_group(list(range(first, first + self._tensor_para_size)), timeout=_NO_TIMEOUT)
                for first in range(0, ranks.world_size, self._tensor_para_size)
            ]
            self._everybody = dist.new_group(timeout=_NO_TIMEOUT)
        self._tensor_group = groups[self.stage]

    def share_out(self, x: Tensor) -> None:
        """Give all ranks what rank 0 has, in place."""
        dist.broadcast(x, 0, group=self._everybody)

    def leave(self) -> None:
        """Part from the others, whatever becomes of them; this process can then join other groups."""
        self.watch.end()
        farewell = threading.Thread(target=dist.destroy_process_group, daemon=True)
        farewell.start()
        farewell.join(_FAREWELL_S)  # NCCL's waits for the others, which may be gone

    def share(self, config: ModelConfig) -> Share:
        """Say which part of the network this process holds; the stages have as many layers as FasterTransformer's."""
        encoder_layers = self._part(config.encoder.num_layer) if config.encoder else None
        is_first, is_leader = self.stage == 0, self.ranks.rank == 0
        return Share(self._part(config.num_layer), self.tensor_rank, is_first, is_leader, encoder_layers)

    def _part(self, layers: int) -> range:
        depth = -(-layers // self._stages)
        return range(layers)[self.stage * depth : (self.stage + 1) * depth]

    def links(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Links:
        """Connect this process's part of the network to the others."""
        return _ProcessLinks(self, config, dtype, device)

    def agree(self, room: int) -> int:
        """Wait until every process has loaded its part; give the least that any of them names.

        Raises:
            EngineError: one of them was lost.
        """
        least = torch.tensor([room])
        with self.loss_is_an_error("another rank could not load its part"):
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._everybody)
        return int(least)

    @property
    def has_whole_sums(self) -> bool:
        """Whether each stage is one process."""
        return self._tensor_para_size == 1

    def reduce(self, part: Tensor) -> None:
        """Sum over the processes of this stage, in place."""
        if not self.has_whole_sums:
            dist.all_reduce(part, group=self._tensor_group)

    def send(self, x: Tensor, rank: int) -> None:
        """Send to another process."""
        dist.send(x.contiguous(), rank, group=self._everybody)

    def receive(self, x: Tensor, rank: int) -> None:
        """Receive what it sends."""
        dist.recv(x, rank, group=self._everybody)

    def announce(self, message: bytes) -> None:
        """Tell all other ranks."""
        first, rest = message[: _FIRST_BYTES - _LENGTH_BYTES], message[_FIRST_BYTES - _LENGTH_BYTES :]
        self._broadcast((len(message).to_bytes(_LENGTH_BYTES, "big") + first).ljust(_FIRST_BYTES))
        if rest:
            self._broadcast(rest)

    def hear(self) -> bytes:
        """Wait for what rank 0 announces."""
        first = self._broadcast(bytes(_FIRST_BYTES))
        size = int.from_bytes(first[:_LENGTH_BYTES], "big")
        rest = max(0, size + _LENGTH_BYTES - _FIRST_BYTES)
        return (first + self._broadcast(bytes(rest)) if rest else first)[_LENGTH_BYTES : _LENGTH_BYTES + size]

    def _broadcast(self, message: bytes) -> bytes:
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        dist.broadcast(content, 0, group=self._everybody)
        return content.numpy().tobytes()

    def spread(self, x: Tensor) -> Tensor:
        """Give all ranks what rank 0 has; x has its shape and type everywhere."""
        if self._stages > 1:
            x = x.contiguous()
            self.share_out(x)
        return x

    def sum_over_all(self, part: Tensor) -> None:
        """Sum over all processes, in place."""
        dist.all_reduce(part, group=self._everybody)

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

    def __init__(self, group: Group, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._config, self._dtype, self._device = group, config, dtype, device
        self.is_alone = group.has_whole_sums

    def share(self, ids: Tensor) -> Tensor:
        """Have rank 0's, in place."""
        self._group.share_out(ids)
        return ids

    def enter(self, embed: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Embed in the first stage, receive in the others."""
        if self._group.previous is None:
            return embed()
        x = torch.empty((*shape, self._config.hidden_units), dtype=self._dtype, device=self._device)
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

    def spread(self, x: Tensor) -> Tensor:
        """Send rank 0's, which leave has given it, to all."""
        return self._group.spread(x)

    def gather(self, parts: list[Tensor], shape: tuple[int, int]) -> list[Tensor]:
        """Sum what all processes have, each in its place."""
        encoder, share, (batch, length) = self._config.encoder, self._group.share(self._config), shape
        assert encoder and share.encoder_layers is not None
        size = (encoder.num_layer, batch, encoder.head_num, length, length)
        whole = torch.zeros(size, dtype=torch.float32, device=self._device)
        for layer, part in zip(share.encoder_layers, parts, strict=True):
            heads = self._group.tensor_rank * part.shape[1]
            whole[layer, :, heads : heads + part.shape[1]] = part
        self._group.sum_over_all(whole)
        return list(whole)


class Leader(Steps):
    """Rank 0's steps: each is announced, then taken.

    Any error leaves the processes out of step with each other, so it ends them all.
    """

    def __init__(self, network: Network, cache: Cache, prefixes: Sequence[Prefix], group: Group) -> None:
        super().__init__(network, cache, prefixes)
        self._group = group

    @contextmanager
    def together(self, name: str, arguments: Sequence[Any]) -> Iterator[None]:
        """See Steps."""
        try:
            self._group.announce(packed(STEP_NAMES.index(name), arguments))
            yield
        except Exception as error:
            problem = f"{_OUT_OF_STEP}: {first_line(error)}"
            self._group.watch.give_up(problem)
            raise GroupLostError(problem) from error

    def close(self) -> None:
        """Send the other processes home."""
        self._group.watch.end()
        self._group.announce(packed(_CLOSE, ()))
        self._group.leave()


def follow(steps: Steps, group: Group) -> None:
    """Take every step that rank 0 announces, until it sends us home.

    Raises:
        EngineError: rank 0 or another process was lost, or a step failed.
    """
    with group.loss_is_an_error(_OUT_OF_STEP), torch.inference_mode():
        while True:
            kind, arguments = unpacked(group.hear())
            if kind == _CLOSE:
                group.leave()
                return
            getattr(steps, STEP_NAMES[kind])(*arguments)


def packed(kind: int, arguments: Sequence[Any]) -> bytes:
    """Write a step down as data, unlike a pickle: its number, and each argument, a whole number, an array or None."""
    return marshal.dumps((kind, [_plain(argument) for argument in arguments]))


def _plain(argument: Any) -> tuple[str, tuple[int, ...], bytes] | int | None:
    if isinstance(argument, np.ndarray):
        return argument.dtype.str, argument.shape, argument.tobytes()
    return None if argument is None else int(argument)


def unpacked(message: bytes) -> tuple[int, list[Any]]:
    """Read what packed wrote."""
    kind, plain = marshal.loads(message)
    return kind, [np.ndarray(p[1], p[0], bytearray(p[2])) if isinstance(p, tuple) else p for p in plain]
