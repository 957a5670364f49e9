"""A network spread over several processes: tensor and pipeline parallelism through torch.distributed.

The processes of a stage (see group.py) hold its layers; each has its shard of every matrix, computes with its own
heads, and the two products that lead back into the residual stream are summed over the stage (``mlp.dense_4h_to_h``,
``attention.dense``). What a stage has made goes to the next, and from the last one back to rank 0, which alone samples.

Rank 0 generates as if it were alone (see steps.py): its ``Leader`` announces every step to the others, which take the
same one in ``follow``. Nothing but the steps is sent, as numbers: the others know neither requests nor sampling.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .config import ModelConfig
from .errors import GroupLostError
from .group import Group
from .layers import Links
from .network import Network
from .pages import Cache
from .prefixes import Prefix
from .ranks import first_line
from .steps import STEP_NAMES, Steps

_CLOSE = -1  # a step's number is its place in STEP_NAMES
_OUT_OF_STEP = "another rank is lost, or a step failed"


class ProcessLinks(Links):
    """Links to the processes of a group."""

    def __init__(self, group: Group, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._config, self._dtype, self._device = group, config, dtype, device
        self.is_alone = group.tensor_size == 1

    def share(self, ids: Tensor) -> Tensor:
        """Have rank 0's, in place."""
        dist.broadcast(ids, 0, group=self._group.everybody)
        return ids

    def enter(self, embed: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Embed in the first stage, receive in the others."""
        if self._group.stage == 0:
            return embed()
        x = torch.empty((*shape, self._config.hidden_units), dtype=self._dtype, device=self._device)
        dist.recv(x, self._group.rank - self._group.tensor_size, group=self._group.everybody)
        return x

    def reduce(self, part: Tensor) -> Tensor:
        """Sum over the stage."""
        if not self.is_alone:
            dist.all_reduce(part, group=self._group.neighbours)
        return part

    def leave(self, x: Tensor) -> Tensor:
        """Send to the next stage, from the last one to rank 0; what rank 0 returns is the last stage's."""
        group, last = self._group, self._group.stages - 1
        if group.stage < last:
            dist.send(x.contiguous(), group.rank + group.tensor_size, group=group.everybody)
            if group.rank == 0:
                dist.recv(x, last * group.tensor_size, group=group.everybody)
        elif last and group.tensor_rank == 0:
            dist.send(x.contiguous(), 0, group=group.everybody)
        return x

    def spread(self, x: Tensor) -> Tensor:
        """Send rank 0's, which leave has given it, to all."""
        return self.share(x.contiguous()) if self._group.stages > 1 else x

    def gather(self, parts: list[Tensor], shape: tuple[int, int]) -> list[Tensor]:
        """Sum what all processes have, each in its place."""
        encoder, share, (batch, length) = self._config.encoder, self._group.share(self._config), shape
        assert encoder and share.encoder_layers is not None
        size = (encoder.num_layer, batch, encoder.head_num, length, length)
        whole = torch.zeros(size, dtype=torch.float32, device=self._device)
        for layer, part in zip(share.encoder_layers, parts, strict=True):
            heads = self._group.tensor_rank * part.shape[1]
            whole[layer, :, heads : heads + part.shape[1]] = part
        dist.all_reduce(whole, group=self._group.everybody)
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
        super().close()
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
                steps.close()
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
