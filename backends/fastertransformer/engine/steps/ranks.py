"""Rank 0 generates as if it held the whole network (see steps/steps.py); the other ranks take the same steps.

``RankZeroSteps`` announces every step before it takes it, and ``follow`` takes the steps that are announced. Only the
steps and their arguments are sent: the other ranks know neither requests nor sampling.
"""

from __future__ import annotations

import logging
import marshal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from ..cache.kv_cache import KvCache
from ..errors import GroupLostError
from ..model.adapters import AdapterPlaces
from ..model.network import Network
from ..model.prefixes import Prefix
from ..parallel.control import ControlChannel
from ..parallel.group import Group, first_line
from .collective import Collective
from .steps import Steps

_log = logging.getLogger(__name__)
_CONTINUE = b"continue"
_FAILURE_S = 10.0  # until the slowest process has failed too
_OUT_OF_STEP = "another rank is lost, or a step failed"


class RankZeroSteps(Steps):
    """Rank 0's steps: each is announced to the other ranks, then taken.

    An error that the others do not raise too leaves the processes out of step, which ends the group; see
    Group.survive_losses.
    """

    def __init__(
        self,
        network: Network,
        cache: KvCache,
        prefixes: Sequence[Prefix],
        adapters: AdapterPlaces | None,
        drafting: Steps | None,
        group: Group,
    ) -> None:
        super().__init__(network, cache, prefixes, adapters, drafting)
        self.group = group
        self.announce = self.slots.announce = self.predictions.announce = self._announce

    def _announce(self, step: Callable[..., Any], part: Collective, arguments: tuple[Any, ...]) -> Any:
        """Announce a step and take it; raises a GroupLostError if it fails here and not in all ranks."""
        self.raise_if_rank_lost()
        try:
            self.group.control.send(packed(step.__name__, arguments))
        except OSError as error:
            raise self.group_lost(error) from error
        try:
            return step(part, *arguments)
        except Exception as error:
            if _has_failed_everywhere(error, self.group.control):
                raise
            raise self.group_lost(error) from error

    def raise_if_rank_lost(self) -> None:
        """Override Steps."""
        if lost := self.group.control.lost:
            raise GroupLostError(lost)

    def raise_if_peer_timed_out(self) -> None:
        """Override Steps."""
        if self.network.comm.has_timed_out():
            raise self.group_lost(TimeoutError("no numbers from a rank for half a minute"))

    def group_lost(self, error: Exception) -> GroupLostError:
        """Report that the ranks are no longer in step, and give the error that says so."""
        control = self.group.control
        problem = control.wait_for_loss() or f"{_OUT_OF_STEP}: {first_line(error)}"
        control.report_loss(problem)
        return GroupLostError(problem)

    def close(self) -> None:
        """Tell the workers to exit."""
        self.group.control.announce_shutdown()
        super().close()
        self.group.close()


def follow(steps: Steps, group: Group) -> None:
    """Take every step that rank 0 announces, until it announces its shutdown.

    Raises:
        EngineError: rank 0 or another process was lost, or a step failed.
    """
    control = group.control
    taken = steps.collective | steps.slots.collective | steps.predictions.collective
    with group.loss_is_an_error(_OUT_OF_STEP), torch.inference_mode():
        while message := control.receive()[0]:
            name, arguments = unpacked(message)
            try:
                taken[name](*arguments)
            except Exception as error:
                if not _may_continue(error, control):
                    raise
                _log.warning("a step failed in every rank: %s", first_line(error))
    steps.close()
    group.close()


# An error that a request causes (an unforeseen input, too little memory) is raised in the same step by all ranks. They
# are then still in step with each other, and only that request fails.


def _has_failed_everywhere(error: Exception, control: ControlChannel) -> bool:
    """Return in rank 0 whether a step that has failed here has failed in all others too; if so, let them continue."""
    with suppress(OSError):
        if all(kind == _kind(error) for kind in control.receive(_FAILURE_S)):
            control.send(_CONTINUE)
            return True
    return False


def _may_continue(error: Exception, control: ControlChannel) -> bool:
    """Return in another rank whether all have failed like this one; otherwise rank 0 restarts the group, or ends."""
    with suppress(OSError):
        control.send(_kind(error))
        return control.receive(_FAILURE_S) == [_CONTINUE]
    return False


def _kind(error: Exception) -> bytes:
    return type(error).__name__.encode()


def packed(name: str, arguments: Sequence[Any]) -> bytes:
    """Serialize a step as plain data, not a pickle: its name and its arguments (integers, arrays, None)."""
    return marshal.dumps((name, [_plain(argument) for argument in arguments]))


def _plain(argument: Any) -> tuple[str, tuple[int, ...], bytes] | int | None:
    if isinstance(argument, np.ndarray):
        return argument.dtype.str, argument.shape, argument.tobytes()
    return None if argument is None else int(argument)


def unpacked(message: bytes) -> tuple[str, list[Any]]:
    """Deserialize what packed gave."""
    name, plain = marshal.loads(message)
    return name, [np.ndarray(p[1], p[0], bytearray(p[2])) if isinstance(p, tuple) else p for p in plain]
