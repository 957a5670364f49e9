"""What a program prints goes to a reader that may leave early, as ``| head`` does. Standard library only."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

READER_LEFT = 128 + 13
"""Exit status, as a shell gives it to a program that SIGPIPE ended."""


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the program quietly, with status ``READER_LEFT``, where its output is no longer read.

    Whatever was printed is on its way when this ends, so that the interpreter does not complain when it exits.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not discard_output():
            raise  # another pipe, or a socket
        raise SystemExit(READER_LEFT) from None


def discard_output() -> bool:
    """Drop what is still to be printed if the reader of our output has left; says whether it has."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # no file: a test's, or closed
        return False
    watched = select.poll()
    watched.register(number, 0)
    if not any(event & select.POLLERR for _, event in watched.poll(0)):
        return False
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, number)
    os.close(sink)
    return True
