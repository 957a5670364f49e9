"""What Slurm says of jobs: squeue knows those that have not ended, sacct those that have. Standard library only."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from handover.errors import SlipwayError

_ALIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESIZING", "STOPPED")
_TIMEOUT_S = 30
_UNKNOWN = "unknown"
_ENDED = "ended"
"""State of a job that has left the queue and that no accounting describes."""


@dataclass(frozen=True)
class SlurmState:
    """What Slurm says of a job.

    Attributes:
        state: PENDING, RUNNING, COMPLETED, ...; ended or unknown where Slurm does not tell.
        exit_code: status and signal, ``1:0``; empty until it has ended.
        elapsed: as Slurm prints times.
        waits_for: why it is pending: Dependency, Resources, ...
    """

    state: str
    exit_code: str = ""
    elapsed: str = ""
    waits_for: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether it waits or runs."""
        return self.state in _ALIVE

    @property
    def is_ending(self) -> bool:
        """Whether its end is decided, and the nodes still clear up."""
        return self.state == "COMPLETING"

    @property
    def has_ended(self) -> bool:
        """Whether it is known to be over."""
        return self.state != _UNKNOWN and not self.is_alive

    def __str__(self) -> str:
        waits_for = f"({self.waits_for})" if self.waits_for not in ("", "None") and self.state == "PENDING" else ""
        return " ".join(filter(None, (self.state, waits_for, self.exit_code, self.elapsed)))


def slurm_states(job_ids: Sequence[str]) -> dict[str, SlurmState]:
    """Ask squeue and sacct for each job.

    squeue is right about what has not ended; accounting hears of it later. What has left the queue has ended, whether
    there is an accounting that knows how or not. Where squeue does not answer, nothing is known but what sacct says.
    """
    if not job_ids:
        return {}
    queue, accounts = _queue(job_ids), _accounts(job_ids)
    return {job_id: _join(job_id, queue, accounts.get(job_id)) for job_id in job_ids}


def _join(job_id: str, queue: dict[str, SlurmState] | None, account: SlurmState | None) -> SlurmState:
    if queue is None:
        return account or SlurmState(_UNKNOWN)
    queued = queue.get(job_id)
    if queued and queued.is_alive:
        return queued
    if account and not account.is_alive:
        return account
    return queued or SlurmState(_ENDED)


def cancel_jobs(job_ids: Sequence[str]) -> None:
    """Cancel jobs.

    Raises:
        SlipwayError: Slurm refuses or does not answer.
    """
    status, _, said = _run("scancel", *job_ids)
    if status:
        raise SlipwayError(f"scancel: {said.strip()}", "check scontrol ping and SLURM_CONF")


def _queue(job_ids: Sequence[str]) -> dict[str, SlurmState] | None:
    """By job; None where squeue does not answer."""
    status, printed, said = _run("squeue", "-h", "-t", "all", "-j", ",".join(job_ids), "-o", "%i|%T|%M|%r")
    if status and "Invalid job id" not in said:  # so it says of a lone job that has left the queue
        return None
    rows = (line.split("|", 3) for line in printed.splitlines() if line.count("|") >= 3)
    return {job_id: SlurmState(state, "", elapsed, reason) for job_id, state, elapsed, reason in rows}


def _accounts(job_ids: Sequence[str]) -> dict[str, SlurmState]:
    """By job; empty where there is no accounting."""
    columns = "JobID,State,ExitCode,Elapsed"
    status, printed, _ = _run("sacct", "-n", "-P", "-X", "-j", ",".join(job_ids), "-o", columns)
    rows = (line.split("|") for line in printed.splitlines() if not status and line.count("|") == 3)
    return {job_id: SlurmState(state.split()[0], code, elapsed) for job_id, state, code, elapsed in rows if state}


def _run(*command: str) -> tuple[int, str, str]:
    """Exit status, output and error output; not found and no answer count as failed."""
    if not shutil.which(command[0]):
        return 127, "", f"there is no {command[0]} here"
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return 124, "", f"{command[0]} did not answer within {_TIMEOUT_S} s"
    return ended.returncode, ended.stdout, ended.stderr
