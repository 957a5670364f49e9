"""A network spread over several processes: tensor and pipeline parallelism through torch.distributed.

The processes of a stage (see group.py) hold its layers; each has its shard of every matrix, computes with its own
heads, and the two products that lead back into the residual stream are summed over the stage (``mlp.dense_4h_to_h``,
``attention.dense``). What a stage has made goes to the next, and from the last one back to the first, each process of
which predicts a part of the vocabulary. The likeliest token all of them find together; where chance, penalties or
log-probabilities need more, rank 0 is given the logits of all, and tells the others what it has chosen.

Rank 0 generates as if it were alone (see steps.py): its ``Leader`` announces every step to the others, which take the
same one in ``follow``. Nothing but the steps is sent, as numbers: the others know neither requests nor sampling.
"""

from __future__ import annotations

import logging
import marshal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..cache.kv_cache import KvCache
from ..errors import GroupLostError
from ..model.config import ModelConfig
from ..model.layers import Links
from ..model.layouts import vocabulary_part
from ..model.linear import Linear
from ..model.network import Network
from ..model.prefixes import Prefix
from ..sampling.argmax import LOST
from ..steps.steps import STEP_NAMES, Steps
from .control import Lines
from .group import Group, first_line
from .peer_memory import open_peers

_log = logging.getLogger(__name__)
_PEER_ROWS = 16  # of hidden numbers that are summed through the peers' memory
_LAST = (1 << 32) - 1
_LOST_KEY = (1 << 63) - 1
_GO_ON = b"go on"
_PATIENCE_S = 10.0  # until the slowest process has failed too
_OUT_OF_STEP = "another rank is lost, or a step failed"


class ProcessLinks(Links):
    """Links to the processes of a group."""

    def __init__(self, group: Group, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._config, self._dtype, self._device = group, config, dtype, device
        self.is_split = group.tensor_size > 1
        self._peers = open_peers(group, device, _PEER_ROWS * config.hidden_units)
        self._part = vocabulary_part(config.vocab_size, group.tensor_rank, group.tensor_size)

    @property
    def note(self) -> str:
        """How processes that share a layer add their parts, for a log."""
        if self._peers:
            return f"sums of up to {_PEER_ROWS} rows in the peers' memory"
        return "sums by NCCL" if self._device.type == "cuda" else "sums by gloo"

    def share(self, x: Tensor) -> Tensor:
        """Broadcast over all."""
        dist.broadcast(x, 0)
        return x

    def enter(self, embed: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Embed in the first stage, receive in the others."""
        if self._group.stage == 0:
            return embed()
        x = torch.empty((*shape, self._config.hidden_units), dtype=self._dtype, device=self._device)
        dist.recv(x, self._group.rank - self._group.tensor_size)
        return x

    def has_given_up(self) -> bool:
        """Say whether a sum or a choice was given up, as another process's numbers did not come."""
        return self._peers is not None and self._peers.has_given_up()

    def add(self, x: Tensor, linear: Linear, inner: Tensor) -> Tensor:
        """Sum over the stage."""
        if not self.is_split:
            return super().add(x, linear, inner)
        part = linear.part(inner)
        if self._peers and self._peers.takes(part):
            return self._peers.add(x, part)
        dist.all_reduce(part, group=self._group.neighbours)
        x += part
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Send to the next stage, from the last one to the first; what the first returns is the last one's."""
        group, last = self._group, self._group.stages - 1
        if group.stage < last:
            dist.send(x.contiguous(), group.rank + group.tensor_size)
            if group.stage == 0:
                dist.recv(x, last * group.tensor_size + group.tensor_rank)
        elif last:
            dist.send(x.contiguous(), group.tensor_rank)
        return x

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Gather in rank 0."""
        size, width = self._group.tensor_size, logits.shape[1]
        if size == 1:
            return logits
        widest = -(-self._config.vocab_size // size)  # all of a gathering are as wide
        mine = F.pad(logits, (0, widest - width)).contiguous()
        parts = [torch.empty_like(mine) for _ in range(size)] if self._group.tensor_rank == 0 else None
        dist.gather(mine, parts, 0, group=self._group.neighbours)
        if parts is None:
            return logits
        widths = [len(vocabulary_part(self._config.vocab_size, rank, size)) for rank in range(size)]
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def choose(self, logits: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """Compare over the first stage."""
        if not self.is_split:
            return super().choose(logits, ids, positions)
        if self._peers:
            tokens = super().choose(logits, ids, positions)
            self._peers.agree(tokens, ids, logits, self._part.start)
            return tokens
        places = logits.argmax(dim=-1)
        values = logits.gather(1, places[:, None])[:, 0]
        keys = ranked(values, places + self._part.start).masked_fill_(~logits[:, 0].isfinite(), _LOST_KEY)
        dist.all_reduce(keys, op=dist.ReduceOp.MAX, group=self._group.neighbours)
        tokens = torch.where(keys == _LOST_KEY, LOST, _LAST - (keys & _LAST))
        ids.copy_(tokens.clamp(min=0))
        positions += 1
        return tokens

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
        dist.all_reduce(whole)
        return list(whole)


class Leader(Steps):
    """Rank 0's steps: each is announced, then taken.

    An error that the others do not meet too leaves the processes out of step with each other, and is the end of the
    group: see Group.outlive.
    """

    def __init__(self, network: Network, cache: KvCache, prefixes: Sequence[Prefix], group: Group) -> None:
        super().__init__(network, cache, prefixes)
        self._group = group

    def check(self) -> None:
        """See Steps."""
        if self._group.lost:
            raise GroupLostError(self._group.lost)

    def doubt(self) -> None:
        """See Steps."""
        links = self.network.links
        if isinstance(links, ProcessLinks) and links.has_given_up():
            raise self._lost(TimeoutError("a rank's numbers have not come for half a minute"))

    @contextmanager
    def together(self, name: str, arguments: Sequence[Any]) -> Iterator[None]:
        """See Steps."""
        self.check()
        try:
            self._group.lines.send(packed(STEP_NAMES.index(name), arguments))
        except OSError as error:
            raise self._lost(error) from error
        try:
            yield
        except Exception as error:
            if not self._has_failed_everywhere(error):
                raise self._lost(error) from error
            raise

    def _has_failed_everywhere(self, error: Exception) -> bool:
        """Wait for what the others say of a step that has failed here, and let them go on if it has there.

        What a request brings about (an input that nobody foresaw, too little memory) all meet at the same place, for
        all take the same steps: they are still in step with each other, and that request alone fails.
        """
        lines = self._group.lines
        with suppress(OSError):
            if all(said == _kind(error) for said in lines.receive(_PATIENCE_S)):
                lines.send(_GO_ON)
                return True
        return False

    def _lost(self, error: Exception) -> GroupLostError:
        lines = self._group.lines
        problem = lines.learn_of_loss() or f"{_OUT_OF_STEP}: {first_line(error)}"
        lines.give_up(problem)
        return GroupLostError(problem)

    def close(self) -> None:
        """Send the other processes home."""
        self._group.lines.say_farewell()
        super().close()
        self._group.leave()


def follow(steps: Steps, group: Group) -> None:
    """Take every step that rank 0 announces, until it sends us home.

    Raises:
        EngineError: rank 0 or another process was lost, or a step failed.
    """
    lines = group.lines
    with group.loss_is_an_error(_OUT_OF_STEP), torch.inference_mode():
        while message := lines.receive()[0]:
            kind, arguments = unpacked(message)
            try:
                getattr(steps, STEP_NAMES[kind])(*arguments)
            except Exception as error:
                if not _is_forgiven(error, lines):
                    raise
                _log.warning("a step failed in every rank: %s", first_line(error))
    steps.close()
    group.leave()


def _is_forgiven(error: Exception, lines: Lines) -> bool:
    """Say whether all have failed like this process; else rank 0 goes on without it, or not at all."""
    with suppress(OSError):
        lines.send(_kind(error))
        return lines.receive(_PATIENCE_S) == [_GO_ON]
    return False


def _kind(error: Exception) -> bytes:
    return type(error).__name__.encode()


def ranked(values: Tensor, tokens: Tensor) -> Tensor:
    """Give numbers of which the largest is the likeliest token's, the first of equals: fp32 [N], [N] -> int64 [N]."""
    bits = (values + 0.0).view(torch.int32)  # -0 is 0
    return (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32) + (_LAST - tokens)


def packed(kind: int, arguments: Sequence[Any]) -> bytes:
    """Write a step down as data, unlike a pickle: its place in STEP_NAMES and its arguments: numbers, arrays, None."""
    return marshal.dumps((kind, [_plain(argument) for argument in arguments]))


def _plain(argument: Any) -> tuple[str, tuple[int, ...], bytes] | int | None:
    if isinstance(argument, np.ndarray):
        return argument.dtype.str, argument.shape, argument.tobytes()
    return None if argument is None else int(argument)


def unpacked(message: bytes) -> tuple[int, list[Any]]:
    """Read what packed wrote."""
    kind, plain = marshal.loads(message)
    return kind, [np.ndarray(p[1], p[0], bytearray(p[2])) if isinstance(p, tuple) else p for p in plain]
