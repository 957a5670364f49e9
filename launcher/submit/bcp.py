"""Base Command Platform: main.py runs inside a multi-node job and starts its commands on the nodes with bcprun.

Not a submitit plugin: nothing is submitted. The job is there already, its stages run one after another in this
process, and an executor of submitit would add a pickle and a queue to a function call.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence

from handover.errors import ConfigError
from launcher.plan.plan import Command, Resources
from launcher.run.command_wrapper import Place
from launcher.run.results import failure_status
from launcher.runner import run_job
from launcher.submit import Job


class BcpExecutor:
    """Run all jobs in order on the nodes of this BCP job.

    Args:
        directory: the project as every node sees it.
        redirect: let bcprun keep each process's output in a file as well.
    """

    def __init__(self, directory: str, redirect: bool) -> None:
        self.place = Place("bcprun", directory=directory, redirect=redirect)

    def wrap(self, command: Command, resources: Resources, env: Mapping[str, str]) -> tuple[str, ...]:
        """Start over the nodes that the stage needs."""
        return self.place.wrap(command, resources, env)

    def preview(self, jobs: Sequence[Job], force: Collection[str]) -> str:
        """Nothing but the commands: no job is submitted."""
        return ""

    def submit(self, jobs: Sequence[Job], force: Collection[str]) -> int:
        """Run every plan in order; returns the exit status of the first failure, or 0."""
        plans = [plan for job in jobs for plan in job.plans]
        results = run_job(plans, self.wrap, force, jobs[0].stages_file)
        return failure_status(results)


def is_first_instance() -> bool:
    """Whether this instance of the job is the one that starts everything."""
    return os.environ.get("NGC_ARRAY_INDEX", "0") == "0"


def check_job(needed: int) -> None:
    """Compare the nodes that a stage needs with those of the job.

    Raises:
        ConfigError: this is no multi-node BCP job, or it has too few nodes.
    """
    size = os.environ.get("NGC_ARRAY_SIZE", "")
    if not size.isdigit() or not shutil.which("bcprun"):
        missing = "there is no bcprun here" if size.isdigit() else "NGC_ARRAY_SIZE is not set"
        raise ConfigError(missing, "start main.py inside a multi-node job of Base Command Platform")
    if needed > int(size):
        raise ConfigError(
            f"the model takes {needed} nodes, but this job has {size} (NGC_ARRAY_SIZE)",
            "start a job with more nodes, or lower the tensor or pipeline parallelism",
        )
