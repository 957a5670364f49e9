"""A child process that ends when its parent does, however that ends. Standard library only."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_libc = ctypes.CDLL(None)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask Linux, in a fresh child, for a signal when the parent dies, even by SIGKILL."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
