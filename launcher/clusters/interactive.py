"""This machine, now."""

from __future__ import annotations

import shutil
import subprocess

from handover.errors import ConfigError
from launcher.clusters.cluster import Cluster
from launcher.config.schema import Config


class Interactive(Cluster):
    """The host of this process: everything runs as its child."""

    executor = "interactive"
    runs_here = True

    def is_here(self) -> bool:
        """Always: nothing is needed."""
        return True

    def fill_in(self, config: Config) -> None:
        """Count the GPUs."""
        if config.cluster.gpus_per_node is None:
            config.cluster.gpus_per_node = _count_gpus()

    def check(self, config: Config) -> None:
        """Refuse containers, which nothing here starts."""
        if config.container or config.deployment.container:
            raise ConfigError(
                "cluster_type=interactive starts no container", "unset container, or start main.py inside the container"
            )


def _count_gpus() -> int:
    """Number of GPUs that nvidia-smi lists; 0 where there is none."""
    program = shutil.which("nvidia-smi")
    if not program:
        return 0
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0
