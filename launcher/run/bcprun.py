"""The nodes of a Base Command Platform job: bcprun starts a command on them. Standard library only."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.plan import Resources
from launcher.run.place import Place


@dataclass(frozen=True)
class BcpNodes(Place):
    """Processes of bcprun, which are told the directory and the variables."""

    starter = "bcprun"

    def start(
        self, argv: Sequence[str], tasks_per_node: int, resources: Resources, env: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Quote for the shell that bcprun gives its one string to; nothing else in the project needs one."""
        flags = ["bcprun", "--nnodes", str(resources.nodes), "--npernode", str(tasks_per_node)]
        flags += [] if self.redirect else ["-no_redirect"]
        flags += [part for name, value in sorted(env.items()) for part in ("--env", f"{name}={value}")]
        return (*flags, "--cmd", f"cd {shlex.quote(self.directory)} && {shlex.join(argv)}")
