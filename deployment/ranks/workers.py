"""Ranks other than the first: the engine's worker processes, started and watched."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deployment.arguments import ServeArguments
from deployment.processes.linux import die_with_parent
from deployment.processes.supervised import describe, last_lines
from deployment.ranks.launchers import Rank
from deployment.ranks.ranks import arguments_of, engine_environment
from handover.errors import ServerError

_PROJECT = Path(__file__).resolve().parents[2]
_MODULE = "backends.fastertransformer.worker"
_POLL_S = 0.2
_GRACE_S = 10.0


def take_part(given: ServeArguments, ranks: Sequence[Rank], is_asked_to_stop: Callable[[float], bool]) -> None:
    """Run the workers, which hear from rank 0 what to load, until that tells them to exit.

    Args:
        given: arguments of rank 0.
        ranks: of this process, each with a worker.
        is_asked_to_stop: waits for that long at most; rank 0 is then asked too, and its shutdown message is awaited.

    Raises:
        ServerError: one ended otherwise.
    """
    with workers(given, ranks) as processes:
        while None in (statuses := [process.poll() for process in processes]) and not any(statuses):
            if is_asked_to_stop(_POLL_S):
                deadline = time.monotonic() + max(0.0, given.exit_timeout_s + _GRACE_S)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    for process in processes:
                        process.wait(max(0.0, deadline - time.monotonic()))
                return
    for rank, status in zip(ranks, statuses, strict=True):
        if status:
            log = arguments_of(rank.rank, given).log
            lines = "".join(f"\n    {line}" for line in last_lines(log))
            raise ServerError(
                f"rank {rank.rank} of {rank.world_size} {describe(status)}\n  last lines of {log}:{lines}"
            )


@contextlib.contextmanager
def workers(given: ServeArguments, ranks: Sequence[Rank]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run a worker for each of these ranks; none is left afterwards.

    Args:
        given: arguments of rank 0.
        ranks: of them; none where one process joins all ranks or is the only one of its node.
    """
    processes = list[subprocess.Popen[bytes]]()
    try:
        for rank in ranks:
            processes.append(_start(arguments_of(rank.rank, given), rank, given.endpoint))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(arguments: ServeArguments, rank: Rank, endpoint: Path) -> subprocess.Popen[bytes]:
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    with arguments.log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            cwd=_PROJECT,
            env={**os.environ, **engine_environment(rank, endpoint, arguments.start_timeout_s)},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
