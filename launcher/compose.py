"""From Hydra's composed configuration to the typed one, on the cluster that is really there."""

from __future__ import annotations

from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from launcher.clusters.table import CLUSTERS, OF_ELSEWHERE, cluster_of, detect_cluster
from launcher.config.schema import Config, to_typed
from launcher.config.secrets import check_secrets
from launcher.config.values import check_values
from launcher.config.wording import explained


def finish(cfg: DictConfig, results_suffix: str = "") -> Config:
    """Resolve ``cluster_type: auto``, take that cluster's own group, and return dataclasses."""
    with explained():
        return _finish(cfg, results_suffix)


def _finish(cfg: DictConfig, results_suffix: str) -> Config:
    usual = OF_ELSEWHERE if cfg.plans else None
    cluster_type = cfg.cluster_type if cfg.cluster_type in CLUSTERS else usual or detect_cluster()
    overrides = written_overrides()
    chosen = any(override.split("=", 1)[0] == "cluster" for override in overrides)
    if not chosen and HydraConfig.get().runtime.choices["cluster"] != cluster_type.name:
        cfg = hydra.compose("config", overrides=[*overrides, f"cluster={cluster_type.name}"])
    if results_suffix:
        cfg.export.run.config_summary = f"{cfg.export.run.config_summary}_{results_suffix}"
    config = to_typed(cfg)
    config.cluster_type = cluster_type
    cluster_of(config).fill_in(config)
    check_values(config)
    check_secrets(config)
    return config


def written_overrides() -> list[str]:
    """This run's settings as they were written: an interpolation in one is not resolved yet."""
    written: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return list(written)
