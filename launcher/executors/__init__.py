"""Executors start jobs: here and now, through Slurm, or inside a Base Command Platform job."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launcher.plan import Command, Resources, StagePlan


@dataclass(frozen=True)
class Job:
    """Plans that run together, in order: a server and its clients belong to one job.

    Attributes:
        name: of the job.
        plan_files: rendered plans, in order.
        stages_file: where the runner keeps the results.
    """

    name: str
    plan_files: tuple[Path, ...]
    stages_file: Path

    def plans(self) -> list[StagePlan]:
        """Read the plans back."""
        return [StagePlan.from_json(path.read_text()) for path in self.plan_files]


class Executor(Protocol):
    """What a place to run has to offer."""

    def wrap(self, command: Command, resources: Resources, env: Mapping[str, str]) -> tuple[str, ...]:
        """Turn a command into the argv that starts it there."""
        ...

    def submit(self, jobs: Sequence[Job], force: Collection[str]) -> bool:
        """Start the jobs in order; True if none is known to have failed."""
        ...
