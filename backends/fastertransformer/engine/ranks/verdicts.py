"""Whether a step that failed has failed alike in all processes, so that they are still in step with each other.

What a request brings about (an input that nobody foresaw, too little memory) every process meets at the same place, for
all take the same steps. Then that request alone fails. Where some have failed and others not, no further step can be
taken together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore  # torch.distributed.PrefixStore; mypy finds it here only

_PATIENCE_S = 10.0  # until the slowest process has failed too
_POLL_S = 0.02
_GO_ON, _END = "go on", "end"


class Verdicts:
    """Of a group, on its steps by number.

    Args:
        store: that all share.
        rank: of this process.
        world_size: of all.
    """

    def __init__(self, store: PrefixStore, rank: int, world_size: int) -> None:
        self._store, self._rank, self._others = store, rank, range(1, world_size)

    def pass_on(self, number: int, error: Exception, is_lost: Callable[[], bool]) -> bool:
        """Say, in rank 0, whether a step has failed alike everywhere, and tell the others."""
        keys = [_key(number, rank) for rank in self._others]
        deadline = time.monotonic() + _PATIENCE_S
        while not (is_there := self._store.check(keys)) and not is_lost() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        is_alike = is_there and all(self._store.get(key).decode() == _kind(error) for key in keys)
        self._store.set(f"{number}", _GO_ON if is_alike else _END)
        return is_alike

    def await_on(self, number: int, error: Exception) -> bool:
        """Tell rank 0 that a step has failed here, and say whether it has everywhere."""
        self._store.set(_key(number, self._rank), _kind(error))
        try:
            self._store.wait([f"{number}"], timedelta(seconds=_PATIENCE_S))
        except RuntimeError:  # it has not failed there, or rank 0 is gone
            return False
        return self._store.get(f"{number}").decode() == _GO_ON


def _key(number: int, rank: int) -> str:
    return f"{number}/{rank}"


def _kind(error: Exception) -> str:
    return type(error).__name__
