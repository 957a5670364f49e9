"""The real tritonserver whose Python stub crashes while it loads: it is started once more, and no more than that."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.servers.bad_starts import EDITED, end_in_first_starts, stand_still_in_first_start
from support.servers.served import Deployment, generate, shared_memory

from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    shards, output = tmp_path / "1-gpu", tmp_path / "model_repo"
    convert(ConvertArguments(DATA / "nemo" / "gpt122_tp1_pp1.nemo", shards, 1, "fp32"))
    build_repository(ExportArguments(shards, output, "fastertransformer", 1, 1, "fp32", 0, 0, max_batch_size=2))
    return output


def deploy(repository: Path, directory: Path, crashes: int, number: str = "SIGBUS") -> Deployment:
    end_in_first_starts(repository, directory.with_name("starts"), crashes, number)
    return Deployment(repository, directory, edited_files=(EDITED,))


def test_a_stub_that_crashes_in_its_first_start_serves_in_its_second(repository: Path, tmp_path: Path) -> None:
    deployment = deploy(repository, tmp_path / "run", 1)
    endpoint = deployment.wait_until_published()
    assert deployment.text.count("starting again: a Python stub of tritonserver ended by SIGBUS before it served") == 1
    assert generate(endpoint, "the world", 4)
    mapped = {line.split("/dev/shm/")[1].split()[0] for pid in deployment.pids_of("stub") for line in regions_of(pid)}
    ours = {name for name in shared_memory() if name.startswith(deployment.prefix)}
    assert mapped and mapped == ours, "regions of the server that crashed are gone"
    assert deployment.stop(signal.SIGTERM) == 0
    assert not [name for name in shared_memory() if name.startswith(deployment.prefix)]


def test_a_server_that_gives_up_a_stub_that_lives_is_started_again(repository: Path, tmp_path: Path) -> None:
    """Triton itself then waits for ever for the stub's end, and the stub for a message."""
    stand_still_in_first_start(repository, tmp_path / "starts")
    deployment = Deployment(repository, tmp_path / "run", edited_files=(EDITED,))
    endpoint = deployment.wait_until_published()
    said = "starting again: tritonserver gave up the Python stub of preprocessing, which had no core for a second"
    assert deployment.text.count(f"{said}, before it served\n") == 1
    assert generate(endpoint, "the world", 4)
    assert deployment.stop(signal.SIGTERM) == 0
    assert (tmp_path / "starts").read_text() == "xx"


def regions_of(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "/dev/shm/" in line]


@pytest.mark.parametrize(("crashes", "number", "again"), [(2, "SIGBUS", 1), (1, "SIGKILL", 0)])
def test_a_second_crash_or_a_kill_is_the_error(
    crashes: int, number: str, again: int, repository: Path, tmp_path: Path
) -> None:
    deployment = deploy(repository, tmp_path / "run", crashes, number)
    assert deployment.wait_for_failed_start(60) == 1
    assert deployment.text.count("starting again: ") == again
    assert (tmp_path / "starts").read_text() == "x" * (again + 1)
    assert deployment.text.count("deploy: a model could not be loaded: Stub process") == 1
    assert not deployment.processes and not deployment.private.exists()
    assert not [name for name in shared_memory() if name.startswith(deployment.prefix)]
