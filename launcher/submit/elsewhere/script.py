"""A job as every other launcher is told it: how many nodes of what kind, which variables, and what each node runs."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from launcher.clusters.kubernetes_names import quantity_bytes
from launcher.config.cluster import ClusterConfig
from launcher.config.kubernetes import KubernetesConfig
from launcher.plan.time_limit import limit_s
from launcher.submit import Job


@dataclass(frozen=True)
class Script:
    """One job.

    Attributes:
        job: its plans.
        words: the runner's command, without the file for the results.
        directory: where nodes have the checkout.
        image: of its container; None: it runs on the nodes themselves.
        gpu_type: what the launcher calls the GPU; empty: the job takes none.
        cpus: that it asks for on a node.
        cluster: keys of clusters, some of which a launcher has too.
        given: keys of ``kubernetes``: secrets, and names of persistent volumes with the paths at which nodes have them.
        variables: plain ones, which the plans have themselves too.
        secrets: names of variables that hold secrets, each with the secret and its key where they are given.
        mounts: directories that a container sees of a node's file system.
    """

    job: Job
    words: tuple[str, ...]
    directory: str
    image: str | None
    gpu_type: str
    cpus: int
    cluster: ClusterConfig
    given: KubernetesConfig
    variables: Mapping[str, str]
    secrets: Mapping[str, str]
    mounts: tuple[str, ...]

    @property
    def stage(self) -> str:
        """Name of the first stage, which tells the run's jobs apart."""
        return self.job.plans[0].stage

    @cached_property
    def name(self) -> str:
        """The job's name, in the letters that every launcher takes."""
        return re.sub(r"[^a-z0-9]+", "-", self.job.plans[0].name.lower()).strip("-")[:40].strip("-")

    @property
    def nodes(self) -> int:
        """How many it takes."""
        return max(plan.resources.nodes for plan in self.job.plans)

    @property
    def gpus(self) -> int:
        """How many it takes on each node."""
        return max(plan.resources.gpus_per_node for plan in self.job.plans)

    @property
    def memory(self) -> str | None:
        """What it asks for on a node, as a quantity of Kubernetes; None: what the launcher gives."""
        stated = [str(size) for plan in self.job.plans if (size := self.given.memory.get(plan.stage))]
        return max(stated, key=quantity_bytes, default=None)

    @property
    def volumes(self) -> dict[str, str]:
        """Paths of persistent volumes, by name."""
        return {name: str(path) for name, path in self.given.volumes.items()}

    @property
    def limit_s(self) -> int | None:
        """Seconds after which it may be ended; None: there is no limit, and a server that stays has none."""
        seconds = math.inf if self.job.stays else limit_s(self.job.time_limit)
        return None if math.isinf(seconds) else math.ceil(seconds)

    def shell(self, rank: str, address: str = "") -> str:
        """Return what each node runs.

        Args:
            rank: the launcher's variable with the node's number; only the first one says how the stages end.
            address: command that prints the node's own address, at which a server that stays listens.
        """
        stages, plans = f"--stages-file={self.job.stages_file}", map(str, self.job.plan_files)
        lines = [f"cd {shlex.quote(self.directory)}"]
        if address and self.job.stays:
            lines.append(f'export POD_IP="$({address})"')
        if self.nodes == 1:
            return "\n".join([*lines, f"exec {shlex.join([*self.words, stages, *plans])}", ""])
        lines.append(f"set -- {shlex.join(plans)}")
        lines.append(f'[ "${rank}" != 0 ] || set -- {shlex.quote(stages)} "$@"')
        return "\n".join([*lines, f'exec {shlex.join(self.words)} "$@"', ""])
