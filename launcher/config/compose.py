"""From Hydra's composed configuration to the typed one, on the cluster that is really there."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from handover.errors import ConfigError
from launcher.config.schema import ClusterType, Config, to_typed
from launcher.config.secrets import check_secrets
from launcher.config.values import check_values
from launcher.config.wording import explained
from launcher.submit.slurm_clients import NOT_FOUND, ask

_UNCONFIGURED = "Could not establish a configuration source"  # Slurm's words where there is no slurm.conf at all


def finish(cfg: DictConfig, results_suffix: str = "") -> Config:
    """Resolve ``cluster_type: auto``, take that cluster's own group, and return dataclasses.

    Args:
        cfg: as Hydra composed it.
        results_suffix: keeps this run's results apart from those of the other points of a sweep.
    """
    with explained():
        return _finish(cfg, results_suffix)


def _finish(cfg: DictConfig, results_suffix: str) -> Config:
    cluster_type = cfg.cluster_type
    if cluster_type is ClusterType.auto:
        cluster_type = detect_cluster()
    overrides = written_overrides()
    chosen = any(override.split("=", 1)[0] == "cluster" for override in overrides)
    if not chosen and HydraConfig.get().runtime.choices["cluster"] != cluster_type.name:
        cfg = hydra.compose("config", overrides=[*overrides, f"cluster={cluster_type.name}"])
    if results_suffix:
        cfg.export.run.config_summary = f"{cfg.export.run.config_summary}_{results_suffix}"
    config = to_typed(cfg)
    config.cluster_type = cluster_type
    if cluster_type is ClusterType.interactive and config.cluster.gpus_per_node is None:
        config.cluster.gpus_per_node = gpus_here()
    check_values(config)
    check_secrets(config)
    return config


def written_overrides() -> list[str]:
    """This run's settings as they were written: an interpolation in one is not resolved yet."""
    written: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return list(written)


def detect_cluster() -> ClusterType:
    """Say where this process runs: in a BCP job, on a host of a Slurm cluster, or neither.

    Raises:
        ConfigError: of a cluster whose controller does not answer.
    """
    if "NGC_ARRAY_SIZE" in os.environ and shutil.which("bcprun"):
        return ClusterType.bcp
    if shutil.which("sbatch") and _slurm_answers():
        return ClusterType.bcm
    return ClusterType.interactive


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


def gpus_here() -> int:
    """Number of GPUs that nvidia-smi lists; 0 where there is none."""
    program = shutil.which("nvidia-smi")
    if not program:
        return 0
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0
