"""Jobs that end badly: what the user is told, and that nothing is left on the nodes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.slurm.cluster import NODES, SlurmCluster, wait_until
from support.slurm.launches import (
    FIVE_STAGES,
    NEMO,
    PROJECT,
    SMALL,
    Launched,
    assert_clean,
    endpoint_of,
    is_running,
    launch,
    node_of,
    override,
    serve,
    wait_for_endpoint,
)

from launcher.plan.plan import Command, Resources, StagePlan, partial
from launcher.run.srun import SlurmSteps


@pytest.fixture(autouse=True)
def no_server_outlives_its_test(slurm: SlurmCluster, tmp_path: Path) -> Iterator[None]:
    yield
    slurm.run("scancel", f"--name=nemo-megatron-{tmp_path.name}")


@pytest.mark.usefixtures("limited")
def test_a_stage_that_fails_cancels_the_rest(slurm: SlurmCluster, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copy(NEMO, tmp_path / "gone.nemo"))
    names = ("export.run.model_train_name=doomed", override("export.model.checkpoint_path", checkpoint))
    later = "cluster.additional_parameters={begin: now+3}"
    launched = launch(slurm, tmp_path / "results", FIVE_STAGES, *names, *SMALL, later)
    checkpoint.write_bytes(b"what was copied over it")
    states = slurm.wait_for_end(*launched.ids)
    assert list(states.values()) == ["FAILED", "CANCELLED", "CANCELLED"]
    assert slurm.run("squeue", "-h", "-j", launched.ids[0]) == ""
    said = f"convert: {checkpoint} is not a tar archive"
    assert said in launched.jobs[0].errors and "srun: error" in launched.stages["convert"]["error"]
    printed = slurm.run(sys.executable, "-m", "launcher", "status", str(launched.results), cwd=PROJECT)
    assert re.search(rf"convert +failed .* FAILED 1:0 .*  {re.escape(said)}", printed), printed
    assert {name: stage["state"] for name, stage in launched.stages.items()} == {
        "convert": "failed",
        **dict.fromkeys(("export", "deploy", "evaluate", "benchmark", "report"), "not run"),
    }


def test_jobs_that_die_before_their_runner_say_why(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A line of cluster.setup fails; the results lie in the login node's own /dev/shm, which no node sees."""
    names = ("export.run.model_train_name=early", override("export.model.checkpoint_path", NEMO), "stages=[convert]")
    setup = 'cluster.setup=["module load nothere || exit 3"]'
    with tempfile.TemporaryDirectory(dir="/dev/shm") as private:
        results = Path(private) / "results"
        one = launch(slurm, tmp_path / "results", *names, setup)
        other = launch(slurm, results, *names, "export.run.dependency=null")
        assert list(slurm.wait_for_end(*one.ids, *other.ids).values()) == ["FAILED", "FAILED"]
        status, logs = ([sys.executable, "-m", "launcher", action] for action in ("status", "logs"))
        assert "on storage that the nodes share" in slurm.run(*status, str(results), cwd=PROJECT)
        for node in NODES:  # Slurm 24.11 has made it there
            shutil.rmtree(slurm.root_of(node) / private.lstrip("/"), ignore_errors=True)
    printed = slurm.run(*status, str(one.results), cwd=PROJECT)
    assert "FAILED 3:0" in printed and "module: command not found" in printed and "_0_log.err" in printed
    assert "module: command not found" in slurm.run(*logs, str(one.results), cwd=PROJECT)


def test_a_measurement_that_fails_does_not_keep_the_next_from_running(slurm: SlurmCluster, tmp_path: Path) -> None:
    absent = ("deployment.endpoint=127.0.0.1:9", "benchmark.vocab_size=1000", "export.run.model_train_name=absent")
    launched = launch(slurm, tmp_path / "results", "stages=[evaluate,benchmark]", *absent, *SMALL)
    assert [job.dependency for job in launched.jobs] == ["singleton", f"afterany:{launched.ids[0]},singleton"]
    assert list(slurm.wait_for_end(*launched.ids).values()) == ["FAILED", "FAILED"], "neither is CANCELLED"
    states = {name: stage["state"] for name, stage in launched.stages.items()}
    assert states == {"evaluate": "failed", "benchmark": "failed", "report": "done"}
    report = next(launched.results.glob("*/*/report/report.md")).read_text()
    assert "Stage evaluate lambada: failed" in report and report.count("no server answers at 127.0.0.1:9") == 2


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
    assert launched.stages["deploy"]["state"] == "done", "it was stopped in good order"


def test_a_server_killed_under_its_client_ends_the_job_with_a_message(
    slurm: SlurmCluster, finished: Launched, tmp_path: Path
) -> None:
    launched = serve(slurm, finished, tmp_path, *SMALL, "benchmark.repeats=1000", stages="deploy,benchmark")
    wait_until(lambda: is_running(launched, "benchmark"), lambda: f"no benchmark: {launched.jobs[0].errors}")
    node = node_of(slurm, launched)
    running = slurm.processes_on(node).items()
    (supervisor,) = [pid for pid, line in running if re.match(r"\S+ -m deployment.serve ", line)]
    os.kill(supervisor, signal.SIGKILL)
    assert list(slurm.wait_for_end(*launched.ids).values()) == ["FAILED"]
    assert "the server died while benchmark ran" in launched.jobs[0].errors
    states = {name: stage["state"] for name, stage in launched.stages.items()}
    assert states == {"deploy": "done", "benchmark": "failed", "report": "done"}
    assert_clean(slurm, node)


def test_a_step_killed_with_9_fails_its_stage_and_stops_the_server(
    slurm: SlurmCluster, finished: Launched, tmp_path: Path
) -> None:
    launched = serve(slurm, finished, tmp_path, *SMALL, "benchmark.repeats=1000", stages="deploy,benchmark")
    wait_until(lambda: is_running(launched, "benchmark"), lambda: f"no benchmark: {launched.jobs[0].errors}")
    node = node_of(slurm, launched)

    def tasks() -> list[int]:
        running = slurm.processes_on(node).items()
        return [pid for pid, line in running if re.match(r"\S+ -m evaluation.benchmark ", line)]

    wait_until(lambda: bool(tasks()), lambda: "the step never started")
    os.kill(tasks()[0], signal.SIGKILL)
    assert list(slurm.wait_for_end(*launched.ids).values()) == ["FAILED"]
    assert "benchmark: exit status 137, killed by SIGKILL" in launched.stages["benchmark"]["error"]
    assert launched.stages["report"]["state"] == "done"
    assert_clean(slurm, node)


def test_a_requeued_job_starts_over_at_what_was_cut_off(
    slurm: SlurmCluster, finished: Launched, tmp_path: Path
) -> None:
    launched = serve(slurm, finished, tmp_path, *SMALL, "benchmark.repeats=60", stages="deploy,benchmark")
    wait_until(lambda: is_running(launched, "benchmark"), lambda: f"no benchmark: {launched.jobs[0].errors}")
    slurm.run("scontrol", "requeue", launched.ids[0])
    assert list(slurm.wait_for_end(*launched.ids).values()) == ["COMPLETED"]
    printed = launched.jobs[0].log.read_text()
    assert re.findall(r"benchmark  (interrupted|done)", printed) == ["interrupted", "done"]


def test_a_time_limit_is_named_and_the_server_stopped_in_good_order(slurm: SlurmCluster, limited: Launched) -> None:
    assert list(slurm.wait_for_end(*limited.ids).values()) == ["FAILED"]
    for text in (limited.jobs[0].errors, limited.stages["deploy"]["error"]):
        assert "deploy: stopped, because the job's time limit is near" in text
        assert "run.time_limit (now 0:01:00)" in text
    assert "stopping   SIGUSR1" in limited.jobs[0].log.read_text()
    assert not endpoint_of(limited).exists()
    assert_clean(slurm, *NODES)


@pytest.mark.long
def test_a_step_that_finds_no_controller_is_tried_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The controller is restarted while the first of two commands runs; nothing but srun has failed then."""
    output = tmp_path / "out"
    first = Command(("/bin/sh", "-c", f"cd {tmp_path}; touch begun; until [ -e away ]; do sleep 0.1; done"))
    made = Command(("/bin/sh", "-c", f"mkdir -p {partial(output)}; echo run >> {partial(output)}/made"))
    plan = StagePlan("convert", "away", (first, made), Resources(), (), output, tmp_path / "logs" / "convert.log")
    (tmp_path / "plan.json").write_text(plan.to_json())
    place = SlurmSteps(directory=str(PROJECT)).to_json()
    runner = shlex.join([sys.executable, "-m", "launcher.runner", f"--place={place}", str(tmp_path / "plan.json")])
    where = [f"--chdir={PROJECT}", f"--output={tmp_path}/job.txt", f"--wrap=exec {runner}"]
    job = slurm.run("sbatch", "--parsable", *where).strip()
    wait_until((tmp_path / "begun").exists, lambda: "the first command never ran")
    with slurm.controller_away():
        (tmp_path / "away").touch()
        said = tmp_path / "job.txt"
        wait_until(lambda: "trying again" in said.read_text(), said.read_text)
    assert slurm.wait_for_end(job) == {job: "COMPLETED"}, said.read_text()
    assert (output / "made").read_text() == "run\n", "once"
