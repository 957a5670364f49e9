"""Run the jobs right here, and wait for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from launcher.executors import Job
from launcher.plan import Command, Resources, StagePlan
from launcher.runner import run_here, run_job


class InteractiveExecutor:
    """This machine, now: all jobs become one, in this process."""

    def wrap(self, command: Command, resources: Resources) -> tuple[str, ...]:
        """Start with this interpreter; there is no container here."""
        return run_here(command, resources)

    def submit(self, jobs: Sequence[Job], force: Collection[str]) -> bool:
        """Run every plan in order; True if all went well."""
        plans = [StagePlan.from_json(path.read_text()) for job in jobs for path in job.plan_files]
        results = run_job(plans, self.wrap, force, jobs[0].stages_file)
        return not any(result.state == "failed" for result in results)
