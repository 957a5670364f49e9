"""Slipway: from a NeMo checkpoint to a scored, measured Triton deployment in one command."""

from __future__ import annotations

import os

# Hydra then raises instead of printing, so that one place words every error (launcher/console.py).
os.environ.setdefault("HYDRA_FULL_ERROR", "1")

import hydra
from omegaconf import DictConfig

from launcher import console, sweep
from launcher.config import register

register()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def run(cfg: DictConfig) -> None:
    """Compose the configuration, plan the stages, submit them."""
    with console.worded_errors():
        sweep.launch(cfg)


if __name__ == "__main__":
    with console.worded_errors():
        run()
        sweep.finish()
