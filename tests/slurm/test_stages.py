"""main.py on a Slurm login node: what it submits, what becomes of the jobs, what it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from support.slurm.cluster import NODES, SlurmCluster
from support.slurm.launches import (
    FIVE_STAGES,
    HOSTILE,
    NEMO,
    PROJECT,
    SMALL,
    Launched,
    assert_clean,
    launch,
    override,
    run_main,
)


def test_five_stages_are_three_jobs_each_after_the_one_before(finished: Launched) -> None:
    stages = [job.stages for job in finished.jobs]
    assert stages == ["convert", "export", "deploy+evaluate+benchmark+report"]
    first, second, _ = finished.ids
    assert [job.dependency for job in finished.jobs] == [
        "singleton",
        f"afterok:{first},singleton",
        f"afterok:{second},singleton",
    ]


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
        assert "\x1b" not in job.log.read_text() + job.errors, "a log is no terminal"


def test_nothing_is_left_on_the_nodes_after_all_stages(slurm: SlurmCluster, finished: Launched) -> None:
    assert_clean(slurm, *NODES)


def test_a_dry_run_shows_the_sbatch_files_that_are_submitted(slurm: SlurmCluster, finished: Launched) -> None:
    name = (override("export.run.model_train_name", HOSTILE), *SMALL, "dry_run=true")
    checkpoint = override("export.model.checkpoint_path", finished.results.parent / "the checkpoint's.nemo")
    shown = run_main(slurm, finished.results, FIVE_STAGES, checkpoint, *name)
    assert shown.returncode == 0, shown.stderr
    scripts = [script.partition("\n")[2] for script in shown.stdout.split("=== sbatch ")[1:]]
    for index, (job, script) in enumerate(zip(finished.jobs, scripts, strict=True)):
        expected = script.replace(f"JOB{index}", finished.ids[index - 1])
        assert job.log.with_name(f"{job.job}_submission.sh").read_text() == expected


def test_two_launches_at_once_do_not_get_in_each_others_way(slurm: SlurmCluster, tmp_path: Path) -> None:
    name = (override("export.model.checkpoint_path", NEMO), "export.run.model_train_name=twins")
    results = tmp_path / "100%user, %x"  # sbatch reads %u and the like in the name of a job's output file
    one, other = (launch(slurm, results, "stages=[convert,export]", *name) for _ in range(2))
    assert set(slurm.wait_for_end(*one.ids, *other.ids).values()) == {"COMPLETED"}
    assert all("running" in job.log.read_text() for job in one.jobs)
    assert all("skipped" in job.log.read_text() for job in other.jobs)


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
    scripts = (tmp_path / "results").glob("*/*/logs/*/*_submission.sh")
    submitted = [script.name.partition("_")[0] for script in scripts]
    assert list(slurm.wait_for_end(*submitted).values()) == ["CANCELLED", "CANCELLED"]
