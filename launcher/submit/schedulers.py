"""Who is asked about jobs that were submitted or rendered: Slurm, or Kubernetes through kubectl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

TAIL_LINES = 20


class JobState(Protocol):
    """What a scheduler says of a job; printed as people read it."""

    @property
    def is_ending(self) -> bool:
        """Whether its end is decided, and its nodes still clear up."""

    @property
    def has_ended(self) -> bool:
        """Whether it is known to be over."""


class Scheduler(Protocol):
    """A scheduler's programs, asked for jobs by the ids that it knows."""

    def absence(self) -> str:
        """Return why nothing can be asked here; empty where its programs are."""

    def states(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        """Ask for the state of each job."""

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs.

        Raises:
            SlipwayError: it refuses or does not answer.
        """

    def reason(self, state: JobState, errors: str | None, file: Path) -> str:
        """Return why a job ended whose runner said nothing; empty where that is not known.

        Args:
            state: of the job, which has ended.
            errors: what it printed as errors into a file; None: there is no such file.
            file: that one.
        """

    def output(self, job_id: str, files: Sequence[Path]) -> list[str]:
        """Return the last lines that a job itself printed, under a heading.

        Args:
            job_id: of the job.
            files: where it prints to, if it does that.
        """


def tail(path: Path) -> list[str]:
    """Return the last lines of a file under its path."""
    if not path.is_file():
        return [f"==> {path}  (not there)"]
    return [f"==> {path}", *indented(path.read_text(errors="replace"))]


def indented(text: str) -> list[str]:
    """Return the last lines of a text as they stand below their heading."""
    return [f"  {line}" for line in text.splitlines()[-TAIL_LINES:]]
