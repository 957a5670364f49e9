"""Jobs that ``plans=export`` writes, read by SkyPilot and Lepton's client, and rendered by NeMo-Run for Slurm."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.runs import elsewhere

from launcher.config.schema import register

HERE = Path(__file__).resolve().parent


@pytest.fixture(params=list(elsewhere.CASES))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    register()
    return elsewhere.write(request.param, tmp_path)


def run(directory: Path, *words: str | Path) -> str:
    """Run their Python, away from the user's own settings."""
    home = directory / "home"
    home.mkdir(exist_ok=True)
    own = {"HOME": str(home), "NEMORUN_HOME": str(home), "COLUMNS": "10000", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTHON"))}
    ended = subprocess.run(
        [os.environ["LAUNCHERS_PYTHON"], *words],
        env={**environment, **own}, cwd=home, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_skypilot_and_lepton_understand_all_of_it(directory: Path) -> None:
    found: dict[str, dict[str, Any]] = json.loads(run(directory, HERE / "read_jobs.py", directory).splitlines()[-1])
    for file, job in found.items():
        serves, over_two = "deploy" in file, "1_deploy" in file
        assert job["nodes"] == (2 if over_two else 1) and "exec python3 -m launcher.runner" in job["run"]
        gpus = (8 if over_two else 1) if serves else 0
        if file.startswith("skypilot/"):
            assert job["gpus"] == ({"H100": gpus} if gpus else {}) and job["image"] == "docker:registry/slipway:1"
            assert list(job["volumes"].values()) == ["results"]
        else:
            assert job["shape"] == (f"gpu.{gpus}xh100" if gpus else "cpu.large")
            assert job["secrets"] == ({"HF_TOKEN": "huggingface"} if over_two else {})
        assert job["env"] == {"NCCL_LAUNCH_MODE": "GROUP", **({"NCCL_DEBUG": "INFO"} if over_two else {})}
    assert len(found) == 2 * len(list((directory / "kuberay").glob("*")) or [0])


def test_nemo_run_renders_a_batch_script(directory: Path) -> None:
    for file in sorted((directory / "nemo_run").glob("*_deploy.py")):
        said = run(directory, file, "--dry-run")
        over_two, serves = file.name == "1_deploy.py", "deploy" in file.name
        options = dict(re.findall(r"#SBATCH --([a-z-]+)=(\S+)", said))
        assert options["nodes"] == ("2" if over_two else "1") and options["ntasks-per-node"] == "1"
        assert options.get("gpus-per-node") == (("8" if over_two else "1") if serves else None)
        assert (options["account"], options.get("partition")) == ("us", "gpu" if over_two else None)
        assert "--container-image registry/slipway:1" in said and "export NCCL_LAUNCH_MODE=GROUP" in said
