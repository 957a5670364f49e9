"""How much time Slurm leaves a job that it ends: KillWait seconds lie between its SIGTERM and its SIGKILL.

Who is killed in between leaves files behind, so a server's end is made to fit. Standard library only.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from deployment.arguments import AnyServer
from deployment.processes.supervised import GRACE_S

_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+) sec", re.MULTILINE)
_SWEEPING_S = 1.0
_ANSWER_S = 10.0


def within_kill_wait(arguments: AnyServer, environment: Mapping[str, str]) -> AnyServer:
    """Shorten what requests in flight get at a server's end to what Slurm allows.

    Returns:
        The arguments; ``exit_timeout_s`` is below 0 where not even the server's own grace fits.
    """
    kill_wait_s = find_kill_wait_s(environment)
    if kill_wait_s is None:
        return arguments
    return replace(arguments, exit_timeout_s=min(arguments.exit_timeout_s, kill_wait_s - GRACE_S - _SWEEPING_S))


def find_kill_wait_s(environment: Mapping[str, str]) -> int | None:
    """Ask Slurm; None outside of a job, and where Slurm does not say, as in a container without its programs."""
    if "SLURM_JOB_ID" not in environment:
        return None
    try:
        asked = subprocess.run(
            ["scontrol", "show", "config"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = _KILL_WAIT.search(asked.stdout)
    return int(found[1]) if found else None
