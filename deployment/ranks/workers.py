"""A rank other than the first: the engine's worker process, started and watched."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from deployment.arguments import ServeArguments
from deployment.processes.linux import die_with_parent
from deployment.processes.supervised import describe, last_lines
from deployment.ranks.launchers import Rank
from deployment.ranks.ranks import engine_environment
from handover.errors import ServerError

_PROJECT = Path(__file__).resolve().parents[2]
_MODULE = "backends.fastertransformer.worker"
_POLL_S = 0.2
_GRACE_S = 10.0


def take_part(arguments: ServeArguments, rank: Rank, endpoint: Path, is_asked_to_stop: Callable[[float], bool]) -> None:
    """Run the worker, which hears from rank 0 what to load, until that sends it home.

    Args:
        arguments: of this rank.
        rank: of this process.
        endpoint: rank 0's endpoint file.
        is_asked_to_stop: waits for that long at most; rank 0 is then asked too, and its shutdown message is awaited.

    Raises:
        ServerError: the worker ended otherwise.
    """
    process = _start(arguments, rank, endpoint)
    try:
        while (status := process.poll()) is None:
            if is_asked_to_stop(_POLL_S):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, arguments.exit_timeout_s + _GRACE_S))
                return
    finally:
        process.kill()
        process.wait()
    if status:
        lines = "".join(f"\n    {line}" for line in last_lines(arguments.log))
        raise ServerError(
            f"rank {rank.rank} of {rank.world_size} {describe(status)}\n  last lines of {arguments.log}:{lines}"
        )


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
