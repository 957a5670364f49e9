"""What Slurm says of jobs: squeue knows those that have not ended, sacct those that have. Standard library only."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from handover import slurm_queue
from handover.clients import Answer, ask, ask_at_once
from handover.errors import SlipwayError
from handover.reasons import reason_in
from launcher.submit.schedulers import JobState, tail

_CANCEL_S = 30.0
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
        return self.state in slurm_queue.ALIVE

    @property
    def is_ending(self) -> bool:
        """Whether its end is decided, and the nodes still clear up."""
        return self.state == slurm_queue.COMPLETING

    @property
    def has_ended(self) -> bool:
        """Whether it is known to be over."""
        return self.state != _UNKNOWN and not self.is_alive

    def __str__(self) -> str:
        waits_for = f"({self.waits_for})" if self.waits_for not in ("", "None") and self.state == "PENDING" else ""
        return " ".join(filter(None, (self.state, waits_for, self.exit_code, self.elapsed)))


def slurm_states(job_ids: Sequence[str]) -> dict[str, SlurmState]:
    """Ask squeue and sacct for each job, both at once, as either may hang.

    squeue is right about what has not ended; accounting hears of it later. What has left the queue has ended, whether
    there is an accounting that knows how or not. Where squeue does not answer, nothing is known but what sacct says.
    """
    if not job_ids:
        return {}
    listed, columns = ",".join(job_ids), "JobID,State,ExitCode,Elapsed"
    sacct = ("sacct", "-n", "-P", "-X", "-j", listed, "-o", columns)
    queued, accounted = ask_at_once(slurm_queue.question(job_ids), sacct)
    queue, accounts = _queue(queued), _accounts(accounted)
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
    status, _, said = ask("scancel", *job_ids, timeout_s=_CANCEL_S)
    if not status:
        return
    if "permission denied" in said.lower():
        who = " ".join(f"job {job_id} is {user}'s" for job_id, user in _owners(job_ids))
        raise SlipwayError(
            f"scancel: {said.strip()}" + (f" ({who})" if who else ""),
            "a job is cancelled by the user who submitted it: ask them, or an operator of the cluster",
        )
    raise SlipwayError(f"scancel: {said.strip()}", "check scontrol ping and SLURM_CONF")


class SlurmJobs:
    """Slurm's programs as a scheduler; see ``Scheduler``."""

    def absence(self) -> str:
        """Return why nothing can be asked here."""
        return "" if shutil.which("squeue") else "there is no squeue here"

    def states(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        """Ask squeue and sacct for each job."""
        return dict(slurm_states(job_ids))

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs by scancel."""
        cancel_jobs(job_ids)

    def reason(self, state: JobState, errors: str | None, file: Path) -> str:
        """Return why a job ended before its runner could say it: what it printed, or what the exit code means."""
        assert isinstance(state, SlurmState)
        if state.state == "CANCELLED":
            return ""
        if errors is not None:
            reason = reason_in(errors.splitlines())
            return f"{reason}  ({file})" if reason else ""
        if state.state == "FAILED":  # slurmd could not open it (0:53), or in 24.11 made its directory on the node
            return f"{file} is not seen here: base_results_dir must be on storage that the nodes share"
        return ""

    def output(self, job_id: str, files: Sequence[Path]) -> list[str]:
        """Return the last lines of the job's own output files."""
        return [line for file in files for line in tail(file)]


def _owners(job_ids: Sequence[str]) -> list[tuple[str, str]]:
    """Whose the jobs are, as far as squeue knows them."""
    printed = ask("squeue", "-h", "-j", ",".join(job_ids), "-o", "%i|%u").printed
    return [(job_id, user) for job_id, _, user in (line.partition("|") for line in printed.splitlines()) if user]


def _queue(answer: Answer) -> dict[str, SlurmState] | None:
    """By job; None where squeue does not answer."""
    rows = slurm_queue.read(answer)
    if rows is None:
        return None
    return {job_id: SlurmState(row.state, "", row.elapsed, row.waits_for) for job_id, row in rows.items()}


def _accounts(answer: Answer) -> dict[str, SlurmState]:
    """By job; empty where there is no accounting."""
    rows = (line.split("|") for line in answer.printed.splitlines() if not answer.status and line.count("|") == 3)
    return {job_id: SlurmState(state.split()[0], code, elapsed) for job_id, state, code, elapsed in rows if state}
