"""The nodes of another launcher, for which jobs are written: ``plans=export``."""

from __future__ import annotations

from handover.errors import ConfigError
from launcher.clusters.cluster import Cluster
from launcher.clusters.kubernetes import check_values
from launcher.config.kubernetes import KubernetesConfig
from launcher.config.schema import Config

_OF_KUBERNETES = ("directory", "namespace", "secret_files", "gpu_node_selector", "queue", "router")
"""Keys of ``kubernetes`` that say nothing here; name and pod_monitor are of objects that are not written."""


class Elsewhere(Cluster):
    """Nodes that nothing is known of here: neither their programs nor their directories."""

    executor = "elsewhere.executor"

    def check(self, config: Config) -> None:
        """Ask for the name of the GPU, by which other launchers choose nodes; refuse what no file of theirs has."""
        check_values(config)
        usual = KubernetesConfig()
        for name in _OF_KUBERNETES:
            if getattr(config.kubernetes, name) != getattr(usual, name):
                raise ConfigError(
                    f"kubernetes.{name} is given with plans=export: it is in no other launcher's file",
                    "leave it out, and say it to the launcher itself",
                )
        if config.cluster.gpus_per_node and not config.cluster.gpu_type:
            raise ConfigError(
                "plans=export without cluster.gpu_type: SkyPilot and Lepton choose nodes by the name of their GPU",
                "cluster.gpu_type=H100, or cluster.gpus_per_node=0 for a run on processors",
            )
