"""The nodes of another launcher, for which jobs are written: ``plans=export``."""

from __future__ import annotations

from handover.errors import ConfigError
from launcher.clusters.cluster import Cluster
from launcher.config.schema import Config


class Elsewhere(Cluster):
    """Nodes that nothing is known of here: neither their programs nor their directories."""

    executor = "elsewhere.executor"

    def check(self, config: Config) -> None:
        """Ask for the name of the GPU: other launchers choose nodes by it."""
        if config.cluster.gpus_per_node and not config.cluster.gpu_type:
            raise ConfigError(
                "plans=export without cluster.gpu_type: SkyPilot and Lepton choose nodes by the name of their GPU",
                "cluster.gpu_type=H100, or cluster.gpus_per_node=0 for a run on processors",
            )
