"""The client programs of clusters, asked so that they cannot keep a command waiting for long. Standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from handover.slurm_variables import for_clients

_QUESTION_S = 5.0
NOT_FOUND, NO_ANSWER = 127, 124


class Answer(NamedTuple):
    """What a program printed.

    Attributes:
        status: its exit status; 127 where there is no such program, 124 where it did not answer.
        printed: its output.
        said: its error output.
    """

    status: int
    printed: str
    said: str


def ask(*command: str, timeout_s: float | None = None) -> Answer:
    """Run one program, for a question's time unless it has more."""
    timeout_s = _QUESTION_S if timeout_s is None else timeout_s
    if not shutil.which(command[0]):
        return Answer(NOT_FOUND, "", f"there is no {command[0]} here")
    try:
        process = subprocess.Popen(
            command,
            env=for_clients(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:  # there is no memory, or no process, for one more
        return Answer(NO_ANSWER, "", f"{command[0]}: {error}")
    with process:
        try:
            printed, said = process.communicate(timeout=timeout_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):  # a site's wrapper goes with what it has started
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return Answer(NO_ANSWER, "", f"{command[0]} did not answer within {timeout_s:g} s")
    return Answer(process.returncode, printed, said)


def ask_at_once(*commands: Sequence[str]) -> list[Answer]:
    """Run several programs side by side."""
    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(lambda command: ask(*command), commands))
