"""tritonserver with the network over two processes, as srun and mpirun start them; then one of them goes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.engines.generated_texts import generated_texts
from support.servers.bad_starts import EDITED, end_in_first_starts
from support.servers.served import PROJECT, assert_no_crash, generate, wait_for

from deployment.arguments import ServeArguments
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from handover.endpoint import Endpoint

NEMO = Path(__file__).resolve().parents[1] / "data" / "nemo" / "gpt122_tp1_pp1.nemo"
PROMPTS = ["the world", "where the river is wide and"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two shards")
    convert(ConvertArguments(NEMO, root / "2-gpu", 2, "fp32"))
    build_repository(ExportArguments(root / "2-gpu", root / "repo", "gpt", 2, 1, "fp32", 0, 0, max_batch_size=4))
    return root / "repo"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one process answers with the whole model."""
    shards = tmp_path_factory.mktemp("alone") / "1-gpu"
    convert(ConvertArguments(NEMO, shards, 1, "fp32"))
    return generated_texts(shards, PROMPTS, 12)


class ServeRanks:
    """One ``deployment.serve`` a rank, with the variables that srun gives its tasks, or one a pod of a group."""

    def __init__(
        self, repository: Path, directory: Path, count: int = 2, are_pods: bool = False, **settings: Any
    ) -> None:
        self.endpoint_file = directory / "endpoint.json"
        log = directory / "server.log"
        arguments = ServeArguments(repository, self.endpoint_file, log, exit_timeout_s=2, **settings)
        self.outputs, self.processes = [], []
        for rank in range(count):
            step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(count)}
            step |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_TASKS_PER_NODE": str(count)}
            if are_pods:
                step = {"LWS_WORKER_INDEX": str(rank), "LWS_GROUP_SIZE": str(count), "SLIPWAY_RUN": f"runner {rank}"}
            self.outputs.append(directory / f"rank{rank}.txt")
            with self.outputs[-1].open("wb") as stream:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "deployment.serve", *arguments.to_argv()],
                        cwd=PROJECT, env={**os.environ, **step}, stdout=stream, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        self.directory = directory

    def wait_until_published(self) -> Endpoint:
        wait_for(lambda: self.endpoint_file.exists() or any(self.statuses))
        assert not any(self.statuses), self.text
        return Endpoint.read(self.endpoint_file)

    @property
    def statuses(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    @property
    def text(self) -> str:
        return "\n".join(file.read_text() for file in self.outputs)

    def wait(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def workers(self) -> list[int]:
        """Processes of the engine's ranks other than the first."""
        return [pid for pid, line in _command_lines() if "fastertransformer.worker" in line and _is_below(self, pid)]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(240)


def _command_lines() -> Iterator[tuple[int, str]]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield int(path.parent.name), path.read_bytes().decode(errors="replace")
        except OSError:
            continue


def _is_below(ranks: ServeRanks, pid: int) -> bool:
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return parent in [process.pid for process in ranks.processes]


@pytest.fixture
def ranks(repository: Path, tmp_path: Path) -> Iterator[ServeRanks]:
    started = ServeRanks(repository, tmp_path)
    yield started
    started.kill()


@pytest.fixture
def ranks_of_a_bad_start(repository: Path, tmp_path: Path) -> Iterator[ServeRanks]:
    """The first server ends by SIGBUS before the other rank has been told where it is."""
    own = Path(shutil.copytree(repository, tmp_path / "repo"))
    end_in_first_starts(own, tmp_path / "starts", 1)
    started = ServeRanks(own, tmp_path, edited_files=(EDITED,))
    yield started
    started.kill()


def test_two_ranks_answer_as_one_process_does_and_end_in_good_order(
    ranks_of_a_bad_start: ServeRanks, expected: list[str]
) -> None:
    ranks = ranks_of_a_bad_start
    endpoint = ranks.wait_until_published()
    assert ranks.text.count("starting again: a Python stub of tritonserver ended by SIGBUS before it served") == 1
    assert [generate(endpoint, prompt, 12) for prompt in PROMPTS] == expected
    assert "shard 1 of 2" in (ranks.directory / "server.rank1.log").read_text()
    for process in ranks.processes:  # srun passes SIGUSR1 on to every task
        process.send_signal(signal.SIGUSR1)
    assert ranks.wait(240) == [0, 0], ranks.text
    assert not ranks.endpoint_file.exists() and not list(ranks.directory.glob(".*"))
    assert_no_crash(ranks.directory, ranks.text)
    log = (ranks.directory / "server.log").read_text()
    assert "is lost" not in log + (ranks.directory / "server.rank1.log").read_text()


@pytest.mark.long  # of the ranks of a pod; two pods of one are in test_pods_run.py
def test_two_pods_of_two_ranks_answer_as_one_process_does(tmp_path: Path, expected: list[str]) -> None:
    convert(ConvertArguments(NEMO, tmp_path / "2-gpu", 2, "fp32"))
    arguments = ExportArguments(tmp_path / "2-gpu", tmp_path / "repo", "gpt", 2, 2, "fp32", 0, 0, max_batch_size=4)
    build_repository(arguments)
    pods = ServeRanks(tmp_path / "repo", tmp_path, are_pods=True)
    try:
        endpoint = pods.wait_until_published()
        assert [generate(endpoint, prompt, 12) for prompt in PROMPTS] == expected
        assert all((tmp_path / f"server.rank{rank}.log").exists() for rank in (1, 2, 3))
        for process in pods.processes:
            process.send_signal(signal.SIGTERM)
        assert pods.wait(240) == [0, 0], pods.text
        assert not pods.workers()
    finally:
        pods.kill()


def test_a_killed_worker_ends_the_deployment_and_every_request(ranks: ServeRanks) -> None:
    endpoint = ranks.wait_until_published()

    def ask_until_it_fails() -> str:
        while True:
            try:
                generate(endpoint, PROMPTS[0], 12)
            except Exception as error:  # tritonclient's or gRPC's
                return str(error)

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(ask_until_it_fails) for _ in range(3)]
        time.sleep(1)
        (worker,) = ranks.workers()
        os.kill(worker, signal.SIGKILL)
        assert ranks.wait(240) == [1, 1]
        assert all(client.result(10) for client in clients)
    assert "rank 1 of 2 was killed by SIGKILL" in ranks.outputs[1].read_text()
    assert "rank 0 of 2: " in ranks.outputs[0].read_text() and "lost" in ranks.outputs[0].read_text()
    assert not ranks.endpoint_file.exists()


def test_a_killed_server_ends_the_worker(ranks: ServeRanks) -> None:
    ranks.wait_until_published()
    ranks.processes[0].kill()
    assert ranks.processes[1].wait(240) == 1
    assert "lost" in ranks.outputs[1].read_text()


def test_another_number_of_processes_is_refused_before_anything_starts(repository: Path, tmp_path: Path) -> None:
    three = ServeRanks(repository, tmp_path, count=3)
    try:
        assert three.wait(240) == [1, 1, 1]
        words = "world_size (3) should equal to tensor_para_size_ * pipeline_para_size_ (2 * 1 here)"
        assert three.text.count(words) == 3 and "srun --ntasks=2" in three.text
        assert "Traceback" not in three.text
    finally:
        three.kill()
