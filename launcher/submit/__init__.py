"""Executors start jobs: here and now, through Slurm, or inside a Base Command Platform job."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from handover.durable import write_atomically
from launcher.plan.plan import Command, Resources, StagePlan
from launcher.plan.time_limit import total


@dataclass(frozen=True)
class Job:
    """Plans that run together, in order: a server and its clients belong to one job.

    Attributes:
        name: of the job.
        plans: in order.
        stages_file: where the runner keeps the results.
    """

    name: str
    plans: tuple[StagePlan, ...]
    stages_file: Path

    @property
    def folder(self) -> Path:
        """The job's own: its plans and, on Slurm, its sbatch file and output by job id."""
        return self.stages_file.parent / self.plans[0].stage

    @property
    def plan_files(self) -> tuple[Path, ...]:
        """Where the plans are written."""
        return tuple(self.folder / f"{plan.log.stem}.plan.json" for plan in self.plans)

    @property
    def time_limit(self) -> str:
        """The sum of the limits of its stages, which share one allocation.

        Evaluations have one limit together, and what takes seconds in the wake of others, the report and the gate,
        none.
        """
        limits = {plan.stage: plan.resources.time_limit for plan in self.plans if not plan.always}
        return total(list(limits.values()) or [self.plans[0].resources.time_limit])

    @property
    def is_replica(self) -> bool:
        """Whether it is one of several servers, whose router is the job after them."""
        return self.plans[0].is_replica

    @property
    def stays(self) -> bool:
        """Whether it is a server without clients in the run, which serves until it is stopped."""
        return self.plans[0].service and not any(plan.needs_server for plan in self.plans)

    def write(self) -> None:
        """Write the plans."""
        for plan, file in zip(self.plans, self.plan_files, strict=True):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, plan.to_json())


class Executor(Protocol):
    """What a place to run has to offer."""

    def wrap(self, command: Command, resources: Resources, env: Mapping[str, str]) -> tuple[str, ...]:
        """Turn a command into the argv that starts it there."""

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse jobs that cannot run there, before anything is written.

        Raises:
            SlipwayError: there is one.
        """

    def preview(self, jobs: Sequence[Job], force: Collection[str]) -> str:
        """What would be submitted for the jobs, as text; empty where the commands are all there is."""

    def submit(self, jobs: Sequence[Job], force: Collection[str]) -> int:
        """Start the jobs in order; returns the exit status of the first that is known to have failed, or 0."""
