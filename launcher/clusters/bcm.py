"""Slurm: jobs with an allocation of their own. Also which options of sbatch a run's jobs cannot have."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from handover.clients import NOT_FOUND, ask
from handover.errors import ConfigError
from launcher.clusters.cluster import Cluster, Replicas
from launcher.config.schema import Config

_UNCONFIGURED = "Could not establish a configuration source"  # Slurm's words where there is no slurm.conf at all

_OTHER_CLUSTER = (
    "status, cancel and the jobs that wait for one another ask the cluster of this host alone: submit there"
)
_WHERE = "a run's output files are found by their names: choose base_results_dir"
_NO_ID = "without the job's id nothing can wait for it"
_REFUSED = {
    **dict.fromkeys(("clusters", "cluster", "M"), _OTHER_CLUSTER),
    **dict.fromkeys(
        ("array", "a"), "each job of an array would run the same stages into the same results; leave it out"
    ),
    **dict.fromkeys(("dependency", "d"), "the jobs of a run wait for one another by it: take export.run.dependency"),
    **dict.fromkeys(("wait", "W"), "main.py returns once the jobs are submitted: look with python -m launcher status"),
    **dict.fromkeys(("output", "error", "o", "e", "open-mode"), _WHERE),
    **dict.fromkeys(("parsable", "quiet", "Q", "test-only", "help", "usage", "version", "h", "V"), _NO_ID),
    "wrap": "the command of a job is its stages",
}
"""Options of sbatch that jobs of a run cannot have, and why."""


class Slurm(Cluster):
    """A cluster that this host submits to."""

    executor = "slurm"
    starts_mpi = True
    starts_containers = True
    allocates = True

    def is_here(self) -> bool:
        """Whether its programs are here and its controller answers."""
        return bool(shutil.which("sbatch")) and _slurm_answers()

    def replicas_are(self, config: Config) -> Replicas:
        """Each is a job, unless they are to share one."""
        return Replicas.jobs if config.deployment.replica_jobs else Replicas.children

    def check(self, config: Config) -> None:
        """Refuse options that a run's jobs cannot have."""
        check_options(config.cluster.additional_parameters)


def check_options(options: Mapping[str, object]) -> None:
    """Refuse options of ``cluster.additional_parameters`` that would lose a job or run it several times.

    Raises:
        ConfigError: naming the option, also where it is written short as sbatch takes it, and why.
    """
    for name in options:
        written = name.replace("_", "-")
        meant = next(
            (option for option in (written, *_REFUSED) if option in _REFUSED and option.startswith(written)), None
        )
        if meant is not None:
            shown = name if written == meant else f"{name} ({meant})"
            raise ConfigError(f"cluster.additional_parameters: a run's jobs cannot have {shown}", _REFUSED[meant])


def _slurm_answers() -> bool:
    """Whether this host belongs to a cluster; one that has Slurm's programs and no configuration does not.

    Raises:
        ConfigError: it does, and the controller does not answer: nothing then says where the run may go.
    """
    ping = ask("scontrol", "ping")
    if ping.status == NOT_FOUND:
        return False
    if ping.status == 0 and " UP" in ping.printed:
        return True
    lines = f"{ping.printed}\n{ping.said}".split("\n")
    told = [line.strip() for line in lines if line.strip("* \t")]  # it frames what it says by asterisks
    controllers = [line for line in told if line.startswith("Slurmctld")]
    said = "; ".join(controllers or told[-1:]) or "nothing"
    if _UNCONFIGURED in said:
        return False
    raise ConfigError(
        f"cluster_type=auto: Slurm's programs are here, but its controller does not answer (scontrol ping: {said})",
        "say cluster_type=interactive to run everything on this machine, or wait for the controller and look with: "
        "python -m launcher doctor",
    )
