"""Run the jobs right here, and wait for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from launcher.config.schema import Config
from launcher.plan.paths import RunPaths
from launcher.plan.plan import Command, Resources
from launcher.run.on_this_host import ThisHost
from launcher.run.place import Place
from launcher.run.results import failure_status
from launcher.runner import run_job
from launcher.submit import Job


class InteractiveExecutor:
    """All jobs become one, in this process, whose commands start at a place: this machine, unless it is another."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def wrap(self, command: Command, resources: Resources, env: Mapping[str, str]) -> tuple[str, ...]:
        """Start at the place; there is no container here."""
        return self.place.wrap(command, resources, env)

    def check(self, jobs: Sequence[Job]) -> None:
        """Nothing: what a process can run, this one can."""

    def preview(self, jobs: Sequence[Job], force: Collection[str]) -> str:
        """Nothing but the commands: no job is submitted."""
        return ""

    def submit(self, jobs: Sequence[Job], force: Collection[str]) -> int:
        """Run every plan in order; returns the exit status of the first failure, or 0."""
        plans = [plan for job in jobs for plan in job.plans]
        results = run_job(plans, self.wrap, force, jobs[0].stages_file, self.place.stop_signals)
        return failure_status(results)


def open_executor(config: Config, paths: RunPaths) -> InteractiveExecutor:
    """Return the executor of any run."""
    return InteractiveExecutor(ThisHost())
