"""A FAKE Slurm: programs on PATH that say what a test wants."""

from __future__ import annotations

from pathlib import Path

NO_ACCOUNTING = "echo 'Slurm accounting storage is disabled' >&2; exit 1"
NO_SUCH_JOB = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


class FakeSlurm:
    """Programs on PATH that print given lines; scancel writes down what it got."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.says("scancel", f'echo "$@" >> "{directory}/cancelled"')

    def says(self, program: str, script: str) -> None:
        written = self.directory / f"{program}.new"
        written.write_text(f"#!/bin/sh\n{script}\n")
        written.chmod(0o755)
        written.replace(self.directory / program)  # one that runs at this moment cannot be written to

    def knows(self, queue: str = "", accounts: str = "") -> None:
        self.says("squeue", f"echo '{queue}'" if queue else NO_SUCH_JOB)
        self.says("sacct", f"echo '{accounts}'" if accounts else NO_ACCOUNTING)

    @property
    def cancelled(self) -> list[str]:
        file = self.directory / "cancelled"
        return file.read_text().split() if file.exists() else []
