"""Base Command Platform: main.py runs inside a multi-node job, in each of its instances."""

from __future__ import annotations

import os
import shutil

from handover.errors import ConfigError
from launcher.clusters.cluster import Cluster
from launcher.config.schema import Config


class BaseCommandPlatform(Cluster):
    """The nodes of a job that is there already, in the one container that it was started with."""

    executor = "bcp"
    starts_mpi = True

    def is_here(self) -> bool:
        """Whether this is such a job."""
        return "NGC_ARRAY_SIZE" in os.environ and bool(shutil.which("bcprun"))

    def starts_runs(self) -> bool:
        """Whether this is the first instance, which starts everything."""
        return os.environ.get("NGC_ARRAY_INDEX", "0") == "0"

    def check(self, config: Config) -> None:
        """Refuse a container for the server alone."""
        if config.deployment.container:
            raise ConfigError(
                "deployment.container: a job of Base Command Platform has one container, for all stages",
                "unset deployment.container, and start the job in an image that has what every stage needs",
            )

    def check_nodes(self, needed: int) -> None:
        """Refuse a job that is none, or that has too few nodes."""
        size = os.environ.get("NGC_ARRAY_SIZE", "")
        if not size.isdigit() or not shutil.which("bcprun"):
            missing = "there is no bcprun here" if size.isdigit() else "NGC_ARRAY_SIZE is not set"
            raise ConfigError(missing, "start main.py inside a multi-node job of Base Command Platform")
        if needed > int(size):
            raise ConfigError(
                f"the model takes {needed} nodes, but this job has {size} (NGC_ARRAY_SIZE)",
                "start a job with more nodes, or lower the tensor or pipeline parallelism",
            )
