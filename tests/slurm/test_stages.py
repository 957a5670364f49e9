"""main.py on a Slurm login node: what it submits, what becomes of the jobs, and what is left when they end badly."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import NODES, SlurmCluster, wait_until

PROJECT = Path(__file__).resolve().parents[2]
NEMO = PROJECT / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"
SMALL = ("benchmark.lengths=[[8,8]]", "benchmark.batch_sizes=[1,2]", "evaluation.task.samples=20")
FIVE_STAGES = "stages=[convert,export,deploy,evaluate,benchmark]"
HOSTILE = """it's "quoted"; touch x"""

_LINE = re.compile(r"(?P<stages>\S+) +submitted +job (?P<job>\d+) +(?P<dependency>\S+) +log (?P<log>.*)")


@dataclass(frozen=True)
class Submitted:
    """One line of what main.py printed."""

    stages: str
    job: str
    dependency: str
    log: Path

    @property
    def errors(self) -> str:
        return self.log.with_suffix(".err").read_text()


@dataclass(frozen=True)
class Launched:
    results: Path
    jobs: list[Submitted]
    elapsed_s: float

    @property
    def ids(self) -> list[str]:
        return [job.job for job in self.jobs]

    @property
    def stages(self) -> dict[str, dict[str, str]]:
        """What the runners noted about each stage."""
        (file,) = self.results.glob("*/*/logs/stages.json")
        return {entry["stage"]: entry for entry in json.loads(file.read_text())}


def override(key: str, value: str | Path) -> str:
    """Quote a value for Hydra's command-line grammar."""
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}="{escaped}"'


def run_main(slurm: SlurmCluster, results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """cluster_type is left at auto: that a controller answers decides."""
    return subprocess.run(
        [sys.executable, str(PROJECT / "main.py"), override("base_results_dir", results), *arguments],
        cwd=results.parent,
        env=slurm.client_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def launch(slurm: SlurmCluster, results: Path, *arguments: str) -> Launched:
    started = time.monotonic()
    result = run_main(slurm, results, *arguments)
    assert result.returncode == 0 and not result.stderr, result.stdout + result.stderr
    lines = [_LINE.fullmatch(line) for line in result.stdout.splitlines()]
    jobs = [
        Submitted(found["stages"], found["job"], found["dependency"], Path(found["log"])) for found in lines if found
    ]
    assert len(jobs) == len(lines), result.stdout
    return Launched(results, jobs, time.monotonic() - started)


@pytest.fixture(scope="module")
def finished(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """All five stages, in a directory and under a name that a shell would trip over."""
    root = tmp_path_factory.mktemp("five") / HOSTILE
    root.mkdir()
    checkpoint = shutil.copy(NEMO, root / "the checkpoint's.nemo")
    names = (override("export.run.model_train_name", HOSTILE), override("export.model.checkpoint_path", checkpoint))
    launched = launch(slurm, root / "re sults", FIVE_STAGES, *names, *SMALL)
    still_to_come = slurm.states(*launched.ids)
    assert "COMPLETED" not in still_to_come.values(), f"main.py did not return at once: {still_to_come}"
    slurm.wait_for_end(*launched.ids)
    return launched


def serve(slurm: SlurmCluster, finished: Launched, root: Path, *arguments: str, stages: str = "deploy") -> Launched:
    """Start a server job of its own on the exported model."""
    (repository,) = finished.results.glob("*/*/model_repo")
    places = (
        override("export.triton_deployment.triton_model_dir", repository / "tiny"),
        "export.run.model_train_name=tiny",
        f"deployment.run.name={root.name}",  # another name: singleton makes jobs of one name wait for each other
    )
    return launch(slurm, root / "results", f"stages=[{stages}]", *places, *arguments)


@pytest.fixture(scope="module")
def limited(slurm: SlurmCluster, finished: Launched, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A server with the shortest time limit there is; begun early, as Slurm looks at the clock every 30 s only."""
    return serve(slurm, finished, tmp_path_factory.mktemp("limited"), "deployment.run.time_limit=0:01:00")


@pytest.fixture(autouse=True)
def no_server_outlives_its_test(slurm: SlurmCluster, tmp_path: Path) -> Iterator[None]:
    yield
    slurm.run("scancel", f"--name=nemo-megatron-{tmp_path.name}")


def endpoint_of(launched: Launched) -> Path:
    (directory,) = launched.results.glob("*/*")
    return directory / "deployment" / "endpoint.json"


def wait_for_endpoint(launched: Launched) -> None:
    endpoint = endpoint_of(launched)
    log = launched.jobs[0].log
    wait_until(
        endpoint.exists, 60, lambda: f"no {endpoint}; {log.read_text() if log.exists() else 'the job is pending'}"
    )


def is_running(launched: Launched, stage: str) -> bool:
    return bool(list(launched.results.glob("*/*/logs/stages.json"))) and launched.stages[stage]["state"] == "running"


def node_of(slurm: SlurmCluster, launched: Launched) -> str:
    return slurm.run("squeue", "-h", "-o", "%N", "-j", launched.ids[0]).strip()


def assert_clean(slurm: SlurmCluster, *nodes: str) -> None:
    """No process of a job is left on the nodes, and nothing in shared memory."""
    for node in nodes:
        left = functools.partial(slurm.processes_on, node)
        wait_until(lambda left=left: not left(), 20, lambda left=left: f"left on a node: {left()}")  # type: ignore[misc]
        assert slurm.shared_memory_of(node) == []


def test_five_stages_are_three_jobs_each_after_the_one_before(finished: Launched) -> None:
    stages = [job.stages for job in finished.jobs]
    assert stages == ["convert", "export", "deploy+evaluate+benchmark+report"]
    first, second, _ = finished.ids
    assert [job.dependency for job in finished.jobs] == [
        "singleton",
        f"afterok:{first},singleton",
        f"afterok:{second},singleton",
    ]
    assert finished.elapsed_s < 15  # 1.5 s where nothing else runs; its target is kept in benchmarks/


def test_every_job_completes_and_its_results_are_there(slurm: SlurmCluster, finished: Launched) -> None:
    assert slurm.states(*finished.ids) == dict.fromkeys(finished.ids, "COMPLETED")
    assert {name: stage["state"] for name, stage in finished.stages.items()} == dict.fromkeys(
        ("convert", "export", "deploy", "evaluate", "benchmark", "report"), "done"
    )
    (results,) = finished.results.glob("*/export_tp1_pp1_fp16_fp16")
    assert results.parent.name == HOSTILE
    assert (results / "model_repo" / HOSTILE / "config.pbtxt").is_file()
    metrics = json.loads((results / "evaluation" / "lambada" / "metrics.json").read_text())
    assert metrics["samples"] == 20
    assert len((results / "benchmark" / "static" / "benchmark.csv").read_text().splitlines()) == 3
    assert (results / "report" / "report.html").is_file()
    assert not list(results.glob("deployment/*endpoint*"))


def test_commands_ran_as_steps_of_one_allocation(slurm: SlurmCluster, finished: Launched) -> None:
    serving = finished.ids[-1]
    printed = slurm.run("sacct", "-n", "-P", "-o", "JobID,State,NodeList,ExitCode", "-j", serving)
    steps = [line.split("|") for line in printed.splitlines() if re.match(r"\d+\.\d", line)]
    assert [step[0] for step in steps] == [f"{serving}.{index}" for index in range(4)]
    assert len({node for _, _, node, _ in steps}) == 1
    assert {(state, status) for _, state, _, status in steps} == {("COMPLETED", "0:0")}


def test_status_needs_only_the_results_directory(slurm: SlurmCluster, finished: Launched) -> None:
    printed = slurm.run(sys.executable, "-m", "launcher", "status", str(finished.results), cwd=PROJECT)
    found = re.findall(r"^  (\w+) +done .* job (\d+) COMPLETED 0:0 ", printed, re.MULTILINE)
    convert, export, serving = finished.ids
    clients = [(stage, serving) for stage in ("deploy", "evaluate", "benchmark", "report")]
    assert found == [("convert", convert), ("export", export), *clients]


def test_a_hostile_name_reaches_slurm_unchanged(slurm: SlurmCluster, finished: Launched) -> None:
    name = slurm.run("sacct", "-X", "-n", "-P", "-o", "JobName", "-j", finished.ids[0]).strip()
    assert name == f"nemo-megatron-convert_{HOSTILE}".replace('"', "`")  # so accounting keeps double quotes
    root = finished.results.parent
    assert sorted(path.name for path in root.iterdir()) == ["re sults", "the checkpoint's.nemo"]
    for job in finished.jobs:
        assert job.log.is_file() and job.log.name == f"{job.job}_0_log.out"


def test_nothing_is_left_on_the_nodes_after_all_stages(slurm: SlurmCluster, finished: Launched) -> None:
    assert_clean(slurm, *NODES)


@pytest.mark.usefixtures("limited")
def test_a_stage_that_fails_cancels_the_rest(slurm: SlurmCluster, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copy(NEMO, tmp_path / "gone.nemo"))
    names = ("export.run.model_train_name=doomed", override("export.model.checkpoint_path", checkpoint))
    later = "cluster.additional_parameters={begin: now+3}"
    launched = launch(slurm, tmp_path / "results", FIVE_STAGES, *names, *SMALL, later)
    checkpoint.unlink()
    states = slurm.wait_for_end(*launched.ids)
    assert list(states.values()) == ["FAILED", "CANCELLED", "CANCELLED"]
    assert slurm.run("squeue", "-h", "-j", launched.ids[0]) == ""
    assert f"convert needs {checkpoint}, which is not there" in launched.jobs[0].errors
    assert {name: stage["state"] for name, stage in launched.stages.items()} == {
        "convert": "failed",
        **dict.fromkeys(("export", "deploy", "evaluate", "benchmark", "report"), "not run"),
    }


def test_two_launches_at_once_do_not_get_in_each_others_way(slurm: SlurmCluster, tmp_path: Path) -> None:
    name = (override("export.model.checkpoint_path", NEMO), "export.run.model_train_name=twins")
    one, other = (launch(slurm, tmp_path / "results", "stages=[convert,export]", *name) for _ in range(2))
    assert set(slurm.wait_for_end(*one.ids, *other.ids).values()) == {"COMPLETED"}
    assert all("running" in job.log.read_text() for job in one.jobs)
    assert all("skipped" in job.log.read_text() for job in other.jobs)


def test_a_requeued_job_starts_over_at_what_was_cut_off(
    slurm: SlurmCluster, finished: Launched, tmp_path: Path
) -> None:
    launched = serve(slurm, finished, tmp_path, *SMALL, "benchmark.repeats=60", stages="deploy,benchmark")
    wait_until(lambda: is_running(launched, "benchmark"), 60, lambda: f"no benchmark: {launched.jobs[0].errors}")
    slurm.run("scontrol", "requeue", launched.ids[0])
    assert list(slurm.wait_for_end(*launched.ids).values()) == ["COMPLETED"]
    printed = launched.jobs[0].log.read_text()
    assert re.findall(r"benchmark  (interrupted|done)", printed) == ["interrupted", "done"]


def test_scancel_leaves_no_process_no_shared_memory_and_no_endpoint(
    slurm: SlurmCluster, finished: Launched, tmp_path: Path
) -> None:
    launched = serve(slurm, finished, tmp_path)
    wait_for_endpoint(launched)
    node = node_of(slurm, launched)
    assert any("triton_python_backend_stub" in line for line in slurm.processes_on(node).values())
    slurm.run("scancel", launched.ids[0])
    assert list(slurm.wait_for_end(*launched.ids).values()) == ["CANCELLED"]
    assert_clean(slurm, node)
    assert sorted(path.name for path in endpoint_of(launched).parent.iterdir()) == ["server.log"]
    assert launched.stages["deploy"]["state"] == "interrupted"


def test_a_server_killed_under_its_client_ends_the_job_with_a_message(
    slurm: SlurmCluster, finished: Launched, tmp_path: Path
) -> None:
    launched = serve(slurm, finished, tmp_path, *SMALL, "benchmark.repeats=1000", stages="deploy,benchmark")
    wait_until(lambda: is_running(launched, "benchmark"), 60, lambda: f"no benchmark: {launched.jobs[0].errors}")
    node = node_of(slurm, launched)
    running = slurm.processes_on(node).items()
    (supervisor,) = [pid for pid, line in running if re.match(r"\S+ -m deployment.serve ", line)]
    os.kill(supervisor, signal.SIGKILL)
    assert list(slurm.wait_for_end(*launched.ids).values()) == ["FAILED"]
    assert "the server died while benchmark ran" in launched.jobs[0].errors
    states = {name: stage["state"] for name, stage in launched.stages.items()}
    assert states == {"deploy": "done", "benchmark": "failed", "report": "done"}
    assert_clean(slurm, node)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("cluster.partition=nowhere", ["cluster.partition=nowhere", "Invalid partition", "legal: debug"]),
        ("cluster.additional_parameters={coment: x}", ["no option 'coment'", "did you mean 'comment'?", "licenses"]),
        ("cluster.gpus_per_task=9", ["sbatch refused", "node configuration is not available"]),
        ("deployment.run.time_limit=2h", ["deployment.run.time_limit", "'2h'", "hours:minutes:seconds"]),
    ],
)
def test_what_slurm_refuses_is_one_error(slurm: SlurmCluster, tmp_path: Path, argument: str, words: list[str]) -> None:
    name = (override("export.model.checkpoint_path", NEMO), "export.run.model_train_name=refused")
    result = run_main(slurm, tmp_path / "results", FIVE_STAGES, *name, argument)
    assert result.returncode == 1 and result.stdout == ""
    problem, hint = result.stderr.splitlines()
    assert problem.startswith("slipway: ") and hint.startswith("  hint: ")
    for word in words:
        assert word in result.stderr
    assert slurm.run("squeue", "-h", "-n", "nemo-megatron-convert_refused") == ""


def test_a_later_job_that_is_refused_takes_the_earlier_ones_along(slurm: SlurmCluster, tmp_path: Path) -> None:
    name = (override("export.model.checkpoint_path", NEMO), "export.run.model_train_name=half")
    size = ("export.model.tensor_model_parallel_size=4", "export.triton_deployment.pipeline_model_parallel_size=4")
    more_than_there_are = "cluster.gpus_per_node=16"
    result = run_main(slurm, tmp_path / "results", FIVE_STAGES, *name, *size, more_than_there_are)
    assert result.returncode == 1 and result.stdout == ""
    assert "sbatch refused nemo-megatron-deploy_half" in result.stderr
    scripts = (tmp_path / "results").glob("*/*/logs/slurm/*_submission.sh")
    submitted = [script.name.partition("_")[0] for script in scripts]
    assert list(slurm.wait_for_end(*submitted).values()) == ["CANCELLED", "CANCELLED"]


def test_a_time_limit_is_named_and_the_server_stopped_in_good_order(slurm: SlurmCluster, limited: Launched) -> None:
    assert list(slurm.wait_for_end(*limited.ids).values()) == ["FAILED"]
    for text in (limited.jobs[0].errors, limited.stages["deploy"]["error"]):
        assert "deploy: stopped, because the job's time limit is near" in text
        assert "run.time_limit (now 0:01:00)" in text
    assert "stopping   SIGUSR1" in limited.jobs[0].log.read_text()
    assert not endpoint_of(limited).exists()
    assert_clean(slurm, *NODES)
