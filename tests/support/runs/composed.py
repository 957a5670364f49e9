"""Configurations as main.py composes them, and text without the paths of this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
import pytest

from launcher.config.schema import PROJECT_DIR, Config, to_typed
from launcher.config.values import check_values
from launcher.pipeline import ordered_stages, plan_stages
from launcher.plan.mounts import with_mounts
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan
from launcher.run.place import interpreter_in

_ON_NODES = "/opt/slipway"
PLACES = [f"launcher_scripts_path={_ON_NODES}", "base_results_dir=/mount/results"]
FIVE = "stages=[convert,export,deploy,evaluate,benchmark]"


def compose(overrides: list[str], cluster: str = "bcm") -> Config:
    with hydra.initialize_config_dir(str(PROJECT_DIR / "conf"), version_base="1.3"):
        config = to_typed(hydra.compose("config", overrides=[*PLACES, f"cluster={cluster}", *overrides]))
    check_values(config)  # as main.py does
    return config


def plans_of(config: Config) -> list[StagePlan]:
    paths = RunPaths.of(config)
    return with_mounts(config, paths, plan_stages(config, paths, ordered_stages(config, paths)))


def compare(text: str, golden: Path, request: pytest.FixtureRequest) -> None:
    """Compare with the reviewed file, or write it; what belongs to this machine gets a name instead."""
    here = {
        str(PROJECT_DIR): "<project>",
        sys.executable: "<python>",
        interpreter_in(_ON_NODES): "<python>",
        f"--user={os.getuid()}:{os.getgid()}": "--user=<user>",
    }
    for found, name in sorted(here.items(), key=lambda pair: -len(pair[0])):
        text = text.replace(found, name)
    if request.config.getoption("--rewrite-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
