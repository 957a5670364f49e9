"""The wheel, installed where neither the checkout nor anything of it can be imported, serves the demonstration model.

The locked packages are not installed once more: a ``.pth`` file lets the new environment see those of this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from handover.provenance import VERSION, code_digest

PROJECT = Path(__file__).resolve().parents[2]
# Folders that stay out; slipway/ is the top of the package itself.
NOT_PACKAGED = {"benchmarks", "docker", "docs", "results", "slipway", "tests"}


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel in it, and an empty working directory."""

    wheel: Path
    programs: Path
    directory: Path

    def run(self, *argv: str, status: int = 0) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.programs / argv[0]), *argv[1:]],
            cwd=self.directory, env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stderr if status else done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    root = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={root}", str(PROJECT)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = root.glob("slipway-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / "venv")], check=True, timeout=180)
    programs = root / "venv" / "bin"
    library = Path(sysconfig.get_path("purelib", vars={"base": str(root / "venv")}))
    (library / "locked.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    install = [*pip, "--python", str(programs / "python"), "install", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    (root / "away").mkdir()
    return Installed(wheel, programs, root / "away")


def test_the_wheel_holds_every_packaged_file_and_one_top_level_name(installed: Installed) -> None:
    listed = subprocess.run(["git", "ls-files", "[!.]*/*"], cwd=PROJECT, capture_output=True, text=True, check=True)
    packaged = {name for name in listed.stdout.splitlines() if name.split("/")[0] not in NOT_PACKAGED}
    with zipfile.ZipFile(installed.wheel) as archive:
        names = set(archive.namelist())
    assert {f"slipway/{name}" for name in packaged | {"main.py"}} - names == set()
    assert {name.split("/")[0] for name in names} == {"slipway", f"slipway-{VERSION}.dist-info"}
    assert {"slipway/__init__.py", "slipway/py.typed", "slipway/conf/config.yaml"} <= names


def test_nothing_but_slipway_can_be_imported(installed: Installed) -> None:
    names = ("main", "launcher", "evaluation", "backends", "slipway")
    code = f"import importlib.util as util; print([name for name in {names} if util.find_spec(name)])"
    assert installed.run("python", "-c", code) == "['slipway']\n"


def test_slipway_serves_the_demonstration_from_any_directory(installed: Installed, tmp_path: Path) -> None:
    assert installed.run("slipway", "--version") == f"slipway {VERSION}\n"
    assert "slipway --info config-groups" in installed.run("slipway", "--config-name=nosuch", status=1)
    installed.run("slipway", "stages=[convert,export,deploy,evaluate]", "evaluation.lambada.samples=4")
    results = installed.directory / "results" / "gpt3_demo" / "export_tp1_pp1_fp16_fp16"
    made_by = json.loads((results / "model_repo" / "manifest.json").read_text())["made_by"]
    assert (made_by["code"], made_by["commit"]) == (code_digest(), "")
    metrics = json.loads((results / "evaluation" / "lambada" / "metrics.json").read_text())
    assert "last_token_accuracy" in json.dumps(metrics)
    assert "lambada" in (results / "report" / "report.html").read_text()
    assert installed.run("slipway", "status", "results").split().count("done") == 5

    checkout = [sys.executable, "main.py", "stages=[convert]", f"base_results_dir={tmp_path}"]
    subprocess.run(checkout, cwd=PROJECT, check=True, capture_output=True, timeout=120)
    by_checkout, by_wheel = (root / "gpt3_demo" / "ft_tp1_fp16" / "1-gpu" for root in (tmp_path, results.parents[1]))
    shards = sorted(file.name for file in by_checkout.glob("*.bin"))
    assert len(shards) > 20
    assert [(by_wheel / name).read_bytes() for name in shards] == [(by_checkout / name).read_bytes() for name in shards]
