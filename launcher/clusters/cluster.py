"""The base of all kinds of clusters: what the launcher asks one, and the usual answers."""

from __future__ import annotations

from launcher.config.schema import Config


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

    def replicates(self, config: Config) -> bool:
        """Whether it starts ``deployment.replicas`` servers of one plan by its own means, not one stage all of them."""
        return False

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
