"""The recipes below docker/: linted by hadolint, and what they copy is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config.deployment import DeploymentConfig

PROJECT = Path(__file__).resolve().parents[2]
DOCKERFILE = PROJECT / "docker" / "Dockerfile"
PODS = DOCKERFILE.with_name("Dockerfile.pods")
RECIPES = (DOCKERFILE, DOCKERFILE.with_name("Dockerfile.fastertransformer"), PODS)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_hadolint_finds_nothing(recipe: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    ended = subprocess.run(
        [hadolint, "--no-color", "--failure-threshold=style", recipe], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")


def test_what_it_copies_is_there_and_not_ignored() -> None:
    sources = re.findall(r"^COPY (\S+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    assert sources == [
        "requirements.lock",
        "requirements-gpu.lock",
        "backends/fastertransformer",
        "models",
        "ft_format",
    ]
    assert (PROJECT / "backends" / "fastertransformer" / "model.py").is_file()
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert [line[1:] for line in ignored if line.startswith("!")] == sources


def test_an_image_of_pods_has_all_that_stages_import_and_nothing_else() -> None:
    """Every package of the product, and what main.py needs beside them."""
    lines = PODS.with_name("Dockerfile.pods.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    packages = {file.parent.name for file in PROJECT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert kept == {*packages, "backends", "conf", "main.py"}
    assert all((PROJECT / name).exists() for name in kept) and lines[0] == "*"


def test_fasterTransformers_recipe_puts_its_parts_where_the_launcher_looks_for_them() -> None:  # noqa: N802
    text = RECIPES[1].read_text()
    assert "COPY" not in text, "its build context is docker/, which has nothing to copy"
    gemm = Path(DeploymentConfig().gemm_binary)
    assert f"WORKDIR {gemm.parents[1]}\n" in text and "-D CMAKE_INSTALL_PREFIX=/opt/tritonserver" in text


def test_its_triton_is_the_one_of_the_lock_file() -> None:
    """Triton's release notes: container 24.10 is server 2.51.0, as is nvidia-pytriton 0.7.0."""
    lock = (PROJECT / "requirements.lock").read_text()
    assert "nvidia-pytriton==0.7.0 " in lock and "tritonclient[grpc, http]==2.51.0 " in lock
    assert re.findall(r"^FROM (\S+)$", DOCKERFILE.read_text(), re.MULTILINE) == [
        "nvcr.io/nvidia/tritonserver:24.10-py3"
    ]
