"""Where commands run, and how one is started there: the base of all places is this process's own host.

Standard library only: the runner on a job host uses it. Another place is a subclass in a module of its own, such as
``launcher.run.srun``, and a line in ``PLACES`` of ``launcher.runner``.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from launcher.plan.plan import PYTHON, Command, Resources
from launcher.run.process import PROJECT_DIR


@dataclass(frozen=True)
class Place:
    """This host: commands are children of this process.

    Attributes:
        starter: the place's name.
        stop_signals: what ends a command in good order, then at once.
        directory: in which commands start that do not inherit ours.
        redirect: each process's output goes to a file of its own too, where the starter can do that.
    """

    starter: ClassVar[str] = "child"
    stop_signals: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGTERM,)
    directory: str = "."
    redirect: bool = False

    def wrap(
        self, command: Command, resources: Resources, env: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[str, ...]:
        """Turn a command into the argv that starts it here.

        Args:
            command: what to start.
            resources: how many nodes, in which container.
            env: variables that a starter or a container must be told; others inherit them.
        """
        inside = resources.container is not None
        argv = command.argv if inside or command.argv[0] != PYTHON else (sys.executable, *command.argv[1:])
        if command.nodes is not None:
            resources = replace(resources, nodes=command.nodes)
        return self.start(argv, command.tasks_per_node, resources, env)

    def start(
        self, argv: Sequence[str], tasks_per_node: int, resources: Resources, env: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Turn a program with its arguments into the argv that starts it, once the interpreter has its name here."""
        return tuple(argv)

    def clean_up_commands(self, resources: Sequence[Resources]) -> list[tuple[str, ...]]:
        """Commands at the end of a job that used these resources."""
        return []

    def cancelling(self, jobs: Sequence[str]) -> list[tuple[str, ...]]:
        """Commands that end other jobs, where there are such things."""
        return []

    def prepare(self, environment: MutableMapping[str, str]) -> None:
        """Take out of the runner's environment what its commands would take for words about themselves."""

    def to_json(self) -> str:
        """Render for the runner's command line."""
        return json.dumps({"starter": self.starter, **asdict(self)}, sort_keys=True)

    @classmethod
    def read(cls, text: str, places: Sequence[type[Place]]) -> Place:
        """Inverse of ``to_json``, of one of the given places."""
        content: dict[str, Any] = json.loads(text)
        kind = {place.starter: place for place in places}[content.pop("starter")]
        tuples: dict[str, Any] = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
        return kind(**{**content, **tuples})


def interpreter_in(project: str) -> str:
    """Name this interpreter as the nodes know it, which may have the checkout and its packages elsewhere."""
    for directory in Path(sys.executable).parents:
        if directory.resolve() == PROJECT_DIR:
            return str(Path(project) / Path(sys.executable).relative_to(directory))
    return sys.executable
