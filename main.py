"""Slipway: from a NeMo checkpoint to a scored, measured Triton deployment in one command."""

from __future__ import annotations

import os
import signal
import sys

# Ctrl-C while modules are still being read ends the command quietly: nothing has begun.
_ends_quietly = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _ends_quietly:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# Hydra then raises instead of printing, so that one place words every error (launcher/config/wording.py).
os.environ.setdefault("HYDRA_FULL_ERROR", "1")

import hydra
from hydra._internal.hydra import Hydra
from omegaconf import DictConfig

from launcher import sweep
from launcher.config import command_line
from launcher.config.run_names import forget_dry_runs
from launcher.config.schema import register
from launcher.config.wording import explained
from launcher.run import console

register()
if _ends_quietly:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def run(cfg: DictConfig) -> str | None:
    """Compose the configuration, plan the stages, submit them; the label of a sweep's point that failed."""
    with console.worded_errors():
        return sweep.launch(cfg)


if __name__ == "__main__":
    with console.worded_errors():
        try:
            sys.argv[1:] = command_line.read(sys.argv[1:])
            if not command_line.says_the_mode(sys.argv[1:]):
                # What it finds then, after it has composed all once more than it needs.
                Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
            with explained():
                run()
        finally:
            forget_dry_runs()
