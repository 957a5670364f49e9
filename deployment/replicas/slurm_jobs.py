"""Slurm jobs of this user, asked and told by Slurm's own programs. Standard library only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from deployment.replicas.replica import NotNowError
from handover import slurm_queue
from handover.clients import NO_ANSWER, ask
from handover.errors import ServerError, shortened

_ANSWER_S = 20.0
_EVERY_S = 2.0
GONE = "GONE"
"""State of a job that Slurm has forgotten."""


class SlurmJobs:
    """Some jobs, of which Slurm is asked every two seconds, in a thread of its own: it may answer late.

    Args:
        ids: of the jobs.
    """

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = tuple(ids)
        self._states, self._times, self._lock = dict[str, str](), 0, threading.Lock()
        threading.Thread(target=self._keep_asking, daemon=True).start()

    def state(self, job: str) -> str:
        """Return what Slurm said last, such as RUNNING; empty: nothing yet, or nothing since it was told something."""
        with self._lock:
            return self._states.get(job, "")

    def requeue(self, job: str) -> None:
        """Have a job run again that has ended, at once; ServerError: Slurm refuses, or is away (NotNowError)."""
        _run("scontrol", "requeue", job)
        with self._lock:
            self._times += 1  # an answer that is under way is of before
            self._states.pop(job, None)
        with contextlib.suppress(ServerError):  # Slurm would wait for two minutes
            _run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def signal(self, job: str, name: str) -> None:
        """Send the runner of a job a signal; nothing where there is none any more."""
        self._cancel("--batch", f"--signal={name}", job)

    def cancel(self, job: str) -> None:
        """Cancel a job, whether it waits or runs."""
        self._cancel(job)

    def _cancel(self, *words: str) -> None:
        try:
            _run("scancel", "--quiet", *words)
        except ServerError as error:
            if slurm_queue.UNKNOWN_JOB not in error.problem:
                raise

    def _keep_asking(self) -> None:
        pause = threading.Event()
        while True:
            with self._lock:
                times = self._times
            found = _ask(self.ids)
            with self._lock:
                if times == self._times:
                    self._states.update(found)
            pause.wait(_EVERY_S)


def _ask(ids: Sequence[str]) -> dict[str, str]:
    """Return the state of each job; empty where the controller is away: what it said last counts."""
    found = slurm_queue.read(ask(*slurm_queue.question(ids), timeout_s=_ANSWER_S))
    return {} if found is None else {job: found[job].state if job in found else GONE for job in ids}


def _run(*words: str) -> None:
    status, _, said = ask(*words, timeout_s=_ANSWER_S)
    if status:
        is_away = status == NO_ANSWER or slurm_queue.CONTROLLER_AWAY.search(said)
        raise (NotNowError if is_away else ServerError)(f"{words[0]}: {shortened(said.strip())}")
