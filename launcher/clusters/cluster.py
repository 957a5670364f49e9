"""The base of all kinds of clusters: what the launcher asks one, and the usual answers."""

from __future__ import annotations

from enum import Enum

from launcher.config.schema import Config


class Replicas(Enum):
    """What several servers of one model are, where a router stands before them."""

    children = "processes of the stage that has the router"
    jobs = "jobs of their own beside the router's"
    pods = "pods that the cluster starts of one plan"


class Cluster:
    """A kind of cluster.

    Attributes:
        executor: module of ``launcher.submit`` whose ``open_executor`` starts the jobs.
        runs_here: stages run on this very host: its programs and ports are those that they find.
        starts_containers: stages run in containers that their jobs start, with mounts.
        starts_mpi: processes of several nodes are joined by MPI.
        allocates: the keys below ``cluster`` say what a job has.
    """

    executor: str
    runs_here = False
    starts_containers = False
    starts_mpi = False
    allocates = False

    def is_here(self) -> bool:
        """Whether this process runs on such a cluster."""
        return False

    def starts_runs(self) -> bool:
        """Whether this process is the one that starts the run, where main.py runs several times."""
        return True

    def replicas_are(self, config: Config) -> Replicas:
        """Return what the servers of ``deployment.replicas`` are."""
        return Replicas.children

    def fill_in(self, config: Config) -> None:
        """Set keys that are left to what is found here."""

    def check(self, config: Config) -> None:
        """Refuse keys that this cluster has no use for.

        Raises:
            ConfigError: there is one.
        """

    def check_nodes(self, needed: int) -> None:
        """Compare the nodes that the model takes with those that are here.

        Raises:
            ConfigError: they are too few.
        """
