"""The base of the launchers that jobs are written for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from launcher.submit.elsewhere.script import Script


class Launcher(ABC):
    """Another launcher; a new one is a class in a module of this folder and a line in ``table.py``."""

    name: str
    suffix: str

    def lacks(self, script: Script) -> str:
        """Return why it cannot run such a job; empty where it can."""
        return ""

    @abstractmethod
    def render(self, script: Script, file: Path) -> str:
        """Return what the file of a job holds."""

    @abstractmethod
    def start(self, script: Script, file: Path) -> list[str]:
        """Return the command that starts a job by its file."""
