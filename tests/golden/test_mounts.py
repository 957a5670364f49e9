"""What containers are told: variables and mounts, read back as the runtimes read them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.runs.composed import compose

from handover.errors import ConfigError
from launcher.pipeline import ordered_stages, plan_stages
from launcher.plan import checks
from launcher.plan.mounts import with_mounts
from launcher.plan.paths import RunPaths
from launcher.run.containers import RUNTIMES, Container

CONTAINED = ["cluster_type=bcm", "container=image", "stages=[convert]"]


def as_pflag_reads(text: str) -> str:
    """Go's pflag, StringToString: one '=' is taken as it stands but for quotes around it, several are a line of CSV."""
    return text.strip('"') if text.count("=") == 1 else next(csv.reader([text]))[0]


@pytest.mark.parametrize("value", ["GROUP", "a,b", "k=v", "k=v,w=x", 'say "x"=1, then', ""])
def test_apptainer_gets_a_variables_value_whole(value: str) -> None:
    container = Container("image", ("/a",), "/a", {"NAME": value}, False, ())
    words = RUNTIMES["apptainer"].start(container, lambda: ())
    (given,) = [word.removeprefix("--env=") for word in words if word.startswith("--env=")]
    assert as_pflag_reads(given) == f"NAME={value}"


def mounts_of(*overrides: str) -> set[str]:
    config = compose([*CONTAINED, *overrides])
    paths = RunPaths.of(config)
    plans = with_mounts(config, paths, plan_stages(config, paths, ordered_stages(config, paths)))
    return {*map(str, paths.mounts), *plans[0].resources.container_mounts}


def test_a_checkpoint_made_of_links_is_mounted_with_what_they_lead_to(tmp_path: Path) -> None:
    """As the cache of the hub is: the snapshot's files are links into another directory."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "7fd1a"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "4f2c").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/4f2c")
    mounted = mounts_of(f"export.model.checkpoint_path={snapshot}", "container_mounts=[/usr/share]")
    assert {str(snapshot), str(blobs), "/usr/share"} <= mounted


def test_a_data_directory_is_mounted_if_it_is_there(tmp_path: Path) -> None:
    assert str(tmp_path) in mounts_of(f"data_dir={tmp_path}")
    assert str(tmp_path / "none") not in mounts_of(f"data_dir={tmp_path}/none")


@pytest.mark.parametrize("key", ["trace", "prompt_file"])
def test_what_a_load_is_made_of_is_mounted(tmp_path: Path, key: str) -> None:
    file = tmp_path / "load.jsonl"
    file.touch()
    assert str(file) in mounts_of("benchmark=load", f"benchmark.load.{key}={file}")


def test_a_checkpoint_that_cannot_be_mounted_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'/training/a:b.nemo' cannot be mounted"):
        mounts_of("export.model.checkpoint_path=/training/a:b.nemo")


@pytest.mark.parametrize("place", ["bcp", "interactive"])
def test_an_image_for_the_server_is_refused_where_nothing_starts_it(place: str) -> None:
    config = compose([f"cluster_type={place}", "deployment.container=ft", "dry_run=true"])
    with pytest.raises(ConfigError, match="container"):
        checks.check(config, RunPaths.of(config), [])
