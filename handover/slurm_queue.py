"""What squeue says of jobs: to the launcher, and to a router whose servers are jobs. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from handover.clients import Answer

COMPLETING = "COMPLETING"
"""State of a job whose end is decided, while the nodes still clear up."""
ALIVE = ("PENDING", "RUNNING", COMPLETING, "CONFIGURING", "REQUEUED", "SUSPENDED", "RESIZING", "STOPPED")
UNKNOWN_JOB = "Invalid job id"
"""What Slurm's programs say of a lone job that has left the queue."""

CONTROLLER_AWAY = re.compile(
    r"(?:Unable to contact slurm controller"
    r"|Slurm backup controller in standby|Socket timed out|Zero Bytes|Insane message|Unexpected message"
    r"|Communication \w+ failure|Message \w+ failure|Connection (?:refused|reset|timed out)|Network is unreachable"
    r"|No route to host|Transport endpoint)"
)
"""What they say where no controller answers, as while one is restarted or another takes over."""


class Queued(NamedTuple):
    """What squeue says of a job.

    Attributes:
        state: PENDING, RUNNING, COMPLETED, ...
        elapsed: as Slurm prints times.
        waits_for: why it is pending: Dependency, Resources, ...
    """

    state: str
    elapsed: str = ""
    waits_for: str = ""


def question(job_ids: Sequence[str]) -> tuple[str, ...]:
    """Return the command that asks for jobs, those that have just ended too."""
    return ("squeue", "-h", "-t", "all", "-j", ",".join(job_ids), "-o", "%i|%T|%M|%r")


def read(answer: Answer) -> dict[str, Queued] | None:
    """Return what the command has printed, by job; None where squeue does not answer."""
    if answer.status and UNKNOWN_JOB not in answer.said:
        return None
    rows = (line.strip().split("|", 3) for line in answer.printed.splitlines() if "|" in line)
    return {job_id: Queued(*said) for job_id, *said in rows}
