"""What differs from one cluster to another is in its class: nothing else asks which one it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict
from support.runs.composed import PLACES as DIRECTORIES
from support.runs.composed import compose

from launcher.clusters.table import CLUSTERS, cluster_of
from launcher.compose import finish
from launcher.config.choices import ClusterType
from launcher.config.command_line import read, says_the_mode
from launcher.config.schema import PROJECT_DIR, Config, register
from launcher.pipeline import executor_for
from launcher.plan.paths import RunPaths
from launcher.plan.plan import Command, Resources
from launcher.run.place import Place
from launcher.runner import PLACES

LAUNCHER = Path(__file__).resolve().parents[2] / "launcher"
BRANCH = re.compile(r"cluster_type (?:is|==|!=|in) |ClusterType\.(?!auto\b)\w+|\.starter [=!]=|\.runtime [=!]=")
TABLES = {"clusters/table.py", "config/schema.py", "config/choices.py"}


def test_no_other_module_asks_which_cluster_or_place_it_is() -> None:
    """``compose`` alone asks whether the configured one is among the clusters: auto is none."""
    found = [
        f"{file.relative_to(LAUNCHER)}: {line.strip()}"
        for file in sorted(LAUNCHER.rglob("*.py"))
        for line in file.read_text().splitlines()
        if BRANCH.search(line) and str(file.relative_to(LAUNCHER)) not in TABLES
    ]
    assert [line.split(":")[0] for line in found] == ["compose.py"], "\n".join(found)


@pytest.mark.parametrize("name", [name for name in ClusterType if name is not ClusterType.auto])
def test_every_kind_of_cluster_has_a_class_and_an_executor(name: ClusterType) -> None:
    register()
    config = compose([f"cluster_type={name}"])
    assert cluster_of(config) is CLUSTERS[name]
    argv = executor_for(config, RunPaths.of(config)).wrap(Command(("true",)), Resources(), {})
    assert argv[0] == {ClusterType.bcm: "srun", ClusterType.bcp: "bcprun"}.get(name, "true")


@pytest.mark.parametrize("name", [name for name in ClusterType if name is not ClusterType.auto])
def test_a_named_cluster_is_composed_once_and_as_it_would_be_in_a_second_time(
    name: ClusterType, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    compositions, compose_all = list[object](), hydra.compose

    def counted(*given: Any, **named: Any) -> Any:
        compositions.append(given)
        return compose_all(*given, **named)

    def finished(words: list[str]) -> Config:
        compositions.clear()
        whole = hydra.compose("config", overrides=[*DIRECTORIES, *words], return_hydra_config=True)
        HydraConfig.instance().set_config(whole)
        with open_dict(whole):
            del whole["hydra"]
        return finish(whole)

    with hydra.initialize_config_dir(str(PROJECT_DIR / "conf"), version_base="1.3"):
        monkeypatch.setattr(hydra, "compose", counted)
        words = [f"cluster_type={name}", "cluster.gpus_per_node=2", "container=x"]
        expected, count = finished(words), len(compositions)
        assert finished(read(words)) == expected
        assert (count, len(compositions)) == (1 + (name is not ClusterType.bcm), 1)
    others = [
        ["cluster=bcp"],
        ["+cluster.x=1", "cluster@y=bcp"],
        ["-m"],
        ["hydra.mode=MULTIRUN"],
        ["cluster_type=auto"],
    ]
    assert all(read([words[0], *more]) == [words[0], *more] for more in others)


@pytest.mark.parametrize("words", [[], ["dry_run=true"], ["hydra.mode=MULTIRUN"], ["hydra={mode: RUN}"]])
def test_what_may_say_the_mode_is_what_hydra_finds_by_composing(words: list[str]) -> None:
    register()
    with hydra.initialize_config_dir(str(PROJECT_DIR / "conf"), version_base="1.3"):
        started: Any = GlobalHydra.instance().hydra
        found = started.get_mode("config", words)
    assert says_the_mode(words) is (found is not None)
    assert says_the_mode([*words, "--config-name=other"])  # it may say it


@pytest.mark.parametrize("kind", PLACES)
def test_a_place_is_read_as_it_was_written(kind: type[Place]) -> None:
    place = kind(directory="/opt/it's here")
    assert Place.read(place.to_json(), PLACES) == place
