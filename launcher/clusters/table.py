"""Every kind of cluster by its ``cluster_type``.

A new one is a name in ``ClusterType`` with its file in conf/cluster, a class in a module of this folder with a line in
``CLUSTERS``, and an executor in ``launcher.submit``.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.clusters.bcm import Slurm
from launcher.clusters.bcp import BaseCommandPlatform
from launcher.clusters.cluster import Cluster
from launcher.clusters.elsewhere import Elsewhere
from launcher.clusters.interactive import Interactive
from launcher.clusters.kubernetes import Kubernetes
from launcher.config.choices import ClusterType
from launcher.config.schema import Config

CLUSTERS: Mapping[ClusterType, Cluster] = {
    ClusterType.bcp: BaseCommandPlatform(),
    ClusterType.bcm: Slurm(),
    ClusterType.interactive: Interactive(),
    ClusterType.kubernetes: Kubernetes(),
}
"""In the order in which they are looked for."""
OF_ELSEWHERE = ClusterType.bcm
"""Whose keys say the size of another launcher's nodes, where none is named."""

_ELSEWHERE = Elsewhere()


def cluster_of(config: Config) -> Cluster:
    """Return the cluster of a run; jobs that are written for other launchers run on none of these."""
    return _ELSEWHERE if config.plans else CLUSTERS[config.cluster_type]


def detect_cluster() -> ClusterType:
    """Return the kind of cluster where this process runs: a BCP job, a host of a Slurm cluster, or neither.

    Raises:
        ConfigError: of a cluster whose controller does not answer.
    """
    return next(name for name, cluster in CLUSTERS.items() if cluster.is_here())
