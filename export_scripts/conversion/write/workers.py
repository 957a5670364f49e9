"""Processes that share a list of work: they are forked when everything is opened, and none outlives its parent.

Threads would do but for the interpreter's lock: on 16 processors, eight of them convert 1.8 GB/s and sixteen 1.3.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from export_scripts.conversion.write.late_writes import Turn
from handover.errors import ArtefactError
from handover.parent import end_with_parent

Result = TypeVar("Result")
Advance = Callable[[int], None]
"""Told the bytes that were written since the last time."""

_POLL_S = 0.1
_WAITING = 3  # pieces for each process, at its work or next
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, from malloc.h


class _Inherited:
    """What a forked process finds: the work, and the counter of bytes."""

    work: Callable[[int, Advance], Any]
    written: Any


def turns(processes: int, count: int) -> list[Turn]:
    """Make locks for the processes that ``run_all`` will fork."""
    if processes <= 1:
        return [threading.Lock() for _ in range(count)]
    context = multiprocessing.get_context("fork")
    return [context.Lock() for _ in range(count)]


def run_all(processes: int, count: int, work: Callable[[int, Advance], Result], advance: Advance) -> Iterator[Result]:
    """Do numbered pieces of work, in order as processes become free; results come as they are finished.

    Args:
        processes: at a time; with one, the work is done here.
        count: of pieces.
        work: given the number of a piece; what it returns is sent back.
        advance: told, here, what the work's own ``advance`` was told there.

    Raises:
        ArtefactError: a process was killed.
        Exception: what the work raised; work that has not begun is dropped.
    """
    if processes <= 1:
        _keep_freed_memory()
        for number in range(count):
            yield work(number, advance)
        return
    with suppress(OSError, AttributeError):  # not glibc's
        ctypes.CDLL(None).malloc_trim(0)  # what planning has freed, and a library of tokenizers
    context = multiprocessing.get_context("fork")
    _Inherited.work, _Inherited.written = work, context.Value("q")
    gc.freeze()  # the collector skips inherited objects: visiting them would copy their pages
    done: SimpleQueue[Future[Result]] = SimpleQueue()
    with ProcessPoolExecutor(min(processes, count), context, _begin, (os.getpid(),)) as pool:
        seen, numbers = 0, iter(range(count))
        try:
            for number in islice(numbers, _WAITING * processes):
                pool.submit(_run, number).add_done_callback(done.put)
            while count:
                job = _next(done)
                written = _Inherited.written.value
                advance(written - seen)
                seen = written
                if job:
                    count -= 1
                    for number in islice(numbers, 1):
                        pool.submit(_run, number).add_done_callback(done.put)
                    yield job.result()
        except BrokenProcessPool as error:
            raise ArtefactError(
                "a process of the conversion was killed", "perhaps for want of memory; the next run continues"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            gc.unfreeze()


def _next(done: SimpleQueue[Future[Result]]) -> Future[Result] | None:
    try:
        return done.get(timeout=_POLL_S)
    except Empty:
        return None


def _begin(parent: int) -> None:
    """Set a new process up: an interrupt is the parent's affair, and the parent's end is ours."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    _keep_freed_memory()
    if os.getppid() != parent:
        os._exit(1)


def _keep_freed_memory() -> None:
    """Have arrays of a few MB reuse memory: by default each one's pages are asked for, cleared and given back."""
    with suppress(OSError, AttributeError):  # not glibc's
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 8 << 20)
        libc.mallopt(_TRIM_THRESHOLD, 64 << 20)


def _run(number: int) -> Any:
    return _Inherited.work(number, _count)


def _count(size_bytes: int) -> None:
    with _Inherited.written.get_lock():
        _Inherited.written.value += size_bytes
