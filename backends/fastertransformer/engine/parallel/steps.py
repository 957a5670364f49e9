"""Rank 0 generates as if it held the whole network (see steps/steps.py); the other ranks take the same steps.

``RankZeroSteps`` announces every step before it takes it, and ``follow`` takes what is announced. Only the steps and
their arguments are sent: the other ranks know neither requests nor sampling.
"""

from __future__ import annotations

import logging
import marshal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from ..cache.kv_cache import KvCache
from ..errors import GroupLostError
from ..model.network import Network
from ..model.prefixes import Prefix
from ..steps.steps import STEP_NAMES, Steps
from .comm import GroupComm
from .control import ControlChannel
from .group import Group, first_line

_log = logging.getLogger(__name__)
_GO_ON = b"go on"
_PATIENCE_S = 10.0  # until the slowest process has failed too
_OUT_OF_STEP = "another rank is lost, or a step failed"


class RankZeroSteps(Steps):
    """Rank 0's steps: each is announced, then taken.

    An error that the others do not meet too leaves the processes out of step with each other, and is the end of the
    group: see Group.survive_losses.
    """

    def __init__(self, network: Network, cache: KvCache, prefixes: Sequence[Prefix], group: Group) -> None:
        super().__init__(network, cache, prefixes)
        self._group = group

    def raise_if_rank_lost(self) -> None:
        """See Steps."""
        if self._group.lost:
            raise GroupLostError(self._group.lost)

    def raise_if_peer_timed_out(self) -> None:
        """See Steps."""
        comm = self.network.comm
        if isinstance(comm, GroupComm) and comm.has_timed_out():
            raise self._lost(TimeoutError("a rank's numbers have not come for half a minute"))

    @contextmanager
    def together(self, name: str, arguments: Sequence[Any]) -> Iterator[None]:
        """See Steps."""
        self.raise_if_rank_lost()
        try:
            self._group.control.send(packed(STEP_NAMES.index(name), arguments))
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
        lines = self._group.control
        with suppress(OSError):
            if all(said == _kind(error) for said in lines.receive(_PATIENCE_S)):
                lines.send(_GO_ON)
                return True
        return False

    def _lost(self, error: Exception) -> GroupLostError:
        lines = self._group.control
        problem = lines.learn_of_loss() or f"{_OUT_OF_STEP}: {first_line(error)}"
        lines.give_up(problem)
        return GroupLostError(problem)

    def close(self) -> None:
        """Send the other processes home."""
        self._group.control.say_farewell()
        super().close()
        self._group.close()


def follow(steps: Steps, group: Group) -> None:
    """Take every step that rank 0 announces, until it sends us home.

    Raises:
        EngineError: rank 0 or another process was lost, or a step failed.
    """
    lines = group.control
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
    group.close()


def _is_forgiven(error: Exception, lines: ControlChannel) -> bool:
    """Say whether all have failed like this process; else rank 0 goes on without it, or not at all."""
    with suppress(OSError):
        lines.send(_kind(error))
        return lines.receive(_PATIENCE_S) == [_GO_ON]
    return False


def _kind(error: Exception) -> bytes:
    return type(error).__name__.encode()


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
