"""Plans: what will run, as data. A plan is JSON; it can be printed, compared and tested without running.

Standard library only: the runner reads plans on job hosts and inside containers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from handover.arguments import ScriptArguments

PYTHON = "python3"
"""argv[0] of project code; an executor replaces it with the interpreter of the place."""
VERDICT_FILE = "gate.json"
REPLICA = "replica-"
"""With its number the stage of a server that is a job of its own."""


@dataclass(frozen=True)
class Command:
    """One program with its arguments; never a shell string.

    Attributes:
        argv: program and arguments, each passed on unchanged.
        tasks_per_node: processes to start on each node.
        nodes: how many of the stage's nodes, from the first; None for all.
    """

    argv: tuple[str, ...]
    tasks_per_node: int = 1
    nodes: int | None = None


def python_module(module: str, arguments: ScriptArguments) -> Command:
    """Run one of the project's modules with its typed arguments."""
    return Command((PYTHON, "-m", module, *arguments.to_argv()))


@dataclass(frozen=True)
class Resources:
    """What a plan needs to run.

    Attributes:
        nodes: number of hosts.
        gpus_per_node: GPUs on each; 0 for none.
        time_limit: Slurm's notation, ``[D-]HH:MM:SS``.
        container: image; None to run on the host.
        container_mounts: extra directories to mount at the same path.
    """

    nodes: int = 1
    gpus_per_node: int = 0
    time_limit: str = "2:00:00"
    container: str | None = None
    container_mounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class StagePlan:
    """The whole truth about one stage of a run.

    Attributes:
        stage: convert, export, deploy, replica-N, evaluate, benchmark, report or gate.
        name: of the job, for people.
        commands: run one after another; the first failure stops the stage.
            Those of a service are what prepares it, and last the server itself.
        resources: what they need.
        inputs: paths that must exist when the plan runs (not when it is written).
        output: directory that is published on success. Commands write to ``partial(output)``.
            A service publishes nothing: its output is where it keeps its endpoint file.
        log: file that receives what the commands print.
        env: variables added to the environment.
        service: the last command is a server: it runs until the stages after it are done.
        needs_server: runs while the service of the same job is up.
        always: runs even if a stage before it failed (the report and the gate).
        independent: nothing needs what it makes, so its failure stops no other (evaluations and benchmarks).
        replicas: servers that are pods of this plan, or jobs beside the one of this plan, which is their router's; 1
            where there is one, or where the last command itself starts all.
        grace_s: of a service: seconds that it has to end once it is told, before it is killed.
        served_by: what of the server that it asks decides its answers and its speed; empty for other stages.
    """

    stage: str
    name: str
    commands: tuple[Command, ...]
    resources: Resources
    inputs: tuple[Path, ...]
    output: Path
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    service: bool = False
    needs_server: bool = False
    always: bool = False
    independent: bool = False
    replicas: int = 1
    grace_s: float = 40.0
    served_by: str = ""

    @property
    def verdict_file(self) -> str:
        """Name of the file with the stage's verdict, which is a result whatever it says; empty for other stages."""
        return VERDICT_FILE if self.stage == "gate" else ""

    @property
    def is_replica(self) -> bool:
        """Whether it is a server that is a job of its own, beside that of its router."""
        return self.stage.startswith(REPLICA)

    def to_json(self) -> str:
        """Render as JSON with sorted keys."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True, default=str) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StagePlan:
        """Inverse of ``to_json``."""
        content: dict[str, Any] = json.loads(text)
        content["commands"] = tuple(
            Command(tuple(command["argv"]), command["tasks_per_node"], command["nodes"])
            for command in content["commands"]
        )
        resources = content["resources"]
        resources["container_mounts"] = tuple(resources["container_mounts"])
        content["resources"] = Resources(**resources)
        content["inputs"] = tuple(Path(path) for path in content["inputs"])
        content["output"], content["log"] = Path(content["output"]), Path(content["log"])
        return cls(**content)

    @property
    def fingerprint(self) -> str:
        """Short digest of what determines the result: commands, environment, and the server that is asked.

        Time limits, job names and node counts do not change what comes out, so they are left out; so are the places of
        the inputs (what they are is for who compares) and of the results, which go on when they are moved or copied.
        """
        commands = [[self._without_places(argument) for argument in command.argv] for command in self.commands]
        decisive: tuple[object, ...] = (self.stage, commands, len(self.inputs), dict(self.env))
        decisive += (self.served_by,) if self.served_by else ()
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]

    def _without_places(self, argument: str) -> str:
        places = {str(self.log.parent.parent): "<results>", str(self.output): "<output>"}
        places |= {str(path): f"<input {number}>" for number, path in enumerate(self.inputs)}
        for place in sorted(places, key=len, reverse=True):
            if len(Path(place).parts) > 1:
                argument = argument.replace(place, places[place])
        return argument


def partial(output: Path) -> Path:
    """The sibling in which an artefact grows until it is published."""
    return output.with_name(output.name + ".partial")


def outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Leave out what the mount of another directory shows anyway, such as results below the repository."""
    chosen = list(dict.fromkeys(paths))
    return tuple(path for path in chosen if not set(map(str, PurePath(path).parents)) & set(chosen))
