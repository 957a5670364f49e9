"""One server of several that is a Slurm job of its own: it is found by its endpoint file, on storage that all share.

Its runner serves until SIGTERM, and starts the server again at SIGHUP. Standard library only.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from deployment.processes.supervised import last_lines
from deployment.replicas.replica import Place, Replica
from deployment.replicas.slurm_jobs import SlurmJobs
from handover.endpoint import Endpoint
from handover.errors import ServerError
from handover.reasons import reason_in
from handover.slurm_queue import ALIVE, COMPLETING

_POLL_S = 0.2


class JobReplica(Replica):
    """A server whose job was submitted beside that of the router.

    Args:
        number: from 0.
        deployment: directory of the deployment, in which the server has its own.
        logs: directory of the logs of all stages.
        jobs: of all replicas, in their order.
    """

    def __init__(self, number: int, deployment: Path, logs: Path, jobs: SlurmJobs) -> None:
        super().__init__(number, deployment)
        self.log, self._jobs, self._job = logs / f"replica-{number}.log", jobs, jobs.ids[number]
        self._run = self._lost_run = ""
        self._is_known = False
        self.place = Place.STARTING

    def start(self) -> None:
        """Have its job run again once it has ended; at first it has been submitted already."""
        if self._is_known:
            self._jobs.requeue(self._job)
            self._lost_run = self._run
        self._is_known, self.place = True, Place.STARTING

    def look(self) -> Place:
        """Look where it is now; a server that came back since the last look was away."""
        state = self._jobs.state(self._job)
        if state == "PENDING":  # Slurm has taken its node away
            self._lost_run = self._run
        run = self._published()
        if state and state not in ALIVE:
            self.place = Place.ENDED
        elif state == "RUNNING" and run and (run == self._run or self.place is not Place.SERVING):
            self.place, self._run = Place.SERVING, run
        elif self.place is Place.SERVING and state:
            self.place = Place.AWAY
        return self.place

    def reason(self) -> str:
        """Return why its job has ended, in its own words where it had any."""
        said = reason_in(last_lines(self.log))
        return f"replica {self.number}: its job {self._job} is {self._jobs.state(self._job)}" + (
            f": {said} ({self.log})" if said else f" ({self.log})"
        )

    @property
    def was_killed(self) -> bool:
        """Whether it may be started again: a job that has ended can always be."""
        return True

    def ask_to_stop(self) -> None:
        """Ask its runner to end once the requests in flight are answered; a job that waits is cancelled."""
        with contextlib.suppress(ServerError):
            if self._jobs.state(self._job) == "RUNNING":
                self._jobs.signal(self._job, "TERM")
            else:
                self._jobs.cancel(self._job)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of its job; after that time it is cancelled."""
        deadline = time.monotonic() + timeout_s
        while (state := self._jobs.state(self._job)) in ALIVE and state != COMPLETING:
            if time.monotonic() > deadline:
                return self.kill()
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Cancel its job; ServerError: Slurm does not take it."""
        self._jobs.cancel(self._job)

    def leave(self) -> None:
        """Have its runner start the server again, in the same job."""
        self._jobs.signal(self._job, "HUP")

    def come_back(self) -> bool:
        """Return whether it has left; it comes back by itself."""
        return self.place is not Place.SERVING

    def _published(self) -> str:
        """Return which start of the server has published its endpoint file; empty: none has that may still run."""
        try:
            found = Endpoint.read(self.endpoint_file)
        except (ServerError, OSError):
            return ""
        is_its_own = found.job_id == self._job and found.deployment != self._lost_run
        return found.deployment if is_its_own else ""
