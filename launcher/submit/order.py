"""In which order Slurm runs the jobs of a run: what each waits for."""

from __future__ import annotations

from launcher.submit import Job


class Order:
    """What of a run has been submitted, and so what the next job waits for.

    Args:
        own: condition of every job, such as singleton.

    Attributes:
        replicas: ids of the servers of the router that comes next.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._before: tuple[Job, str] | None = None
        self.replicas: list[str] = []

    def append(self, job: Job, job_id: str) -> None:
        """Note a job that was submitted."""
        if job.is_replica:
            self.replicas.append(job_id)
        else:
            self._before, self.replicas = (job, job_id), []

    def dependency(self, job: Job) -> str:
        """Return what a job waits for; Slurm joins conditions with either ',' (all) or '?' (any).

        A job runs after the failure of the one before it too, where nothing needs what that makes. A router begins once
        all of its servers have begun, and so holds no node while these wait for theirs.
        """
        conditions = []
        if self._before is not None:
            before, before_id = self._before
            after = "afterany" if all(plan.independent for plan in before.plans) else "afterok"
            conditions.append(f"{after}:{before_id}")
        if self.replicas and not job.is_replica:
            conditions.append(f"after:{':'.join(self.replicas)}")
        if self._own and not (conditions and "?" in self._own):
            conditions.append(self._own)
        return ",".join(conditions)
