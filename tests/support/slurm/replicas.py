"""Several servers that are jobs, behind a router that is one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support.slurm.launches import Launched, endpoint_of


def said_by(launched: Launched) -> str:
    """All that the router's job and those of the servers have said."""
    files = [file for job in launched.jobs for file in (job.log, job.log.with_suffix(".err")) if file.exists()]
    return "\n".join(f"{file}:\n{file.read_text()}" for file in files)


def file_of(launched: Launched, number: int) -> Path:
    return endpoint_of(launched).parent / f"replica-{number}" / "endpoint.json"


@contextmanager
def asking(ask: Callable[[], object]) -> Iterator[list[str]]:
    """A client that asks the router without a break; yields what it was told where it should have got an answer."""
    failures, is_over, said = list[str](), threading.Event(), ask()

    def keep_asking() -> None:
        while not is_over.is_set():
            try:
                assert ask() == said
            except Exception as error:
                failures.append(str(error))

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        yield failures
    finally:
        is_over.set()
        thread.join()
