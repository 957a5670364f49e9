"""Base Command Platform at its outermost boundary: a fake bcprun (tests/bcp/bcprun), everything else real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
NEMO = PROJECT / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"
PLACE = Path(__file__).resolve().parent
LLAMA = PROJECT / "examples" / "llama_demo" / "checkpoints"
STAND_IN = PROJECT / "tests" / "support" / "engine_programs" / "vllm"


def in_bcp_job(
    tmp_path: Path, *arguments: str, nodes: int = 2, index: int = 0, array_type: str = "MPIJob"
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run main.py as an instance of a BCP job; returns also the arguments of each bcprun."""
    log = tmp_path / "bcprun.jsonl"
    job = {"NGC_ARRAY_SIZE": str(nodes), "NGC_ARRAY_INDEX": str(index), "NGC_ARRAY_TYPE": array_type}
    job["NGC_JOB_ID"] = "7"
    environment = {**os.environ, **job, "FAKE_BCPRUN_LOG": str(log), "PATH": f"{PLACE}:{os.environ['PATH']}"}
    ended = subprocess.run(
        [sys.executable, str(PROJECT / "main.py"), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    return ended, [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """A results workspace with the checkpoint where training leaves it."""
    checkpoints = tmp_path / "mount" / "results" / "gpt3_126m" / "checkpoints"
    checkpoints.mkdir(parents=True)
    shutil.copy(NEMO, checkpoints)
    return tmp_path / "mount"


def guide_command(mount: Path) -> list[str]:
    """The command of the inference guide's section on Base Command Platform, with paths of this test."""
    return [
        *("stages=[export]", "cluster_type=bcp", f"launcher_scripts_path={PROJECT}"),
        *(f"data_dir={mount}/data/the_pile_gpt3", f"base_results_dir={mount}/results"),
        *("export.run.model_train_name=gpt3_126m", "export.model.tensor_model_parallel_size=2"),
        "export.triton_deployment.pipeline_model_parallel_size=1",
    ]


def test_the_guides_command_works_as_written(tmp_path: Path, mount: Path) -> None:
    ended, calls = in_bcp_job(tmp_path, *guide_command(mount))
    assert ended.returncode == 0, ended.stderr
    results = mount / "results" / "gpt3_126m" / "export_tp2_pp1_fp16_fp16"
    assert (results / "model_repo" / "gpt3_126m" / "1" / "2-gpu" / "config.ini").is_file()
    assert [call[:5] for call in calls] == [["--nnodes", "1", "--npernode", "1", "-no_redirect"]] * 2
    assert all(call[call.index("--env") + 1] == "NCCL_LAUNCH_MODE=GROUP" for call in calls)


def test_all_five_stages_run_and_auto_finds_the_job(tmp_path: Path, mount: Path) -> None:
    stages = "stages=[convert,export,deploy,evaluate,benchmark]"
    small = ("evaluation.lambada.samples=5", "benchmark.batch_sizes=[1]", "benchmark.lengths=[[8,8]]")
    where = (f"base_results_dir={mount}/results", "export.run.model_train_name=gpt3_126m")
    ended, calls = in_bcp_job(tmp_path, stages, *where, *small)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "report.html" in ended.stdout and len(calls) == 6
    alive = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert alive == ""


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_ranks_of_the_drop_in_engine_get_a_process_each(tmp_path: Path, mount: Path, nodes: int) -> None:
    """In an array of PyTorch's type, whose processes hear of their ranks by RANK and WORLD_SIZE."""
    small = ("evaluation.lambada.samples=5", "evaluation.lambada.batch_size=4")
    where = (f"base_results_dir={mount}/results", "export.run.model_train_name=gpt3_126m")
    pipeline = f"export.triton_deployment.pipeline_model_parallel_size={nodes}"
    parallel = ("export.model.tensor_model_parallel_size=2", pipeline)
    ended, calls = in_bcp_job(
        tmp_path,
        *("stages=[export,deploy,evaluate]", *where, *parallel, *small, "cluster.gpus_per_node=2"),
        array_type="PYTORCH",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (served,) = [call for call in calls if "deployment.serve" in call[-1]]
    assert served[:4] == ["--nnodes", str(nodes), "--npernode", "2"]
    (log,) = (mount / "results" / "gpt3_126m").rglob("logs/deploy.log")
    assert log.read_text().count("serving ") == 1  # not one whole server a process


@pytest.mark.parametrize("nodes", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_another_projects_server_is_one_process_a_node(tmp_path: Path, mount: Path, nodes: str) -> None:
    """A stand-in for vLLM's program, which computes with transformers."""
    sizes = (f"deployment.nodes={nodes}", f"export.model.tensor_model_parallel_size={nodes}")
    where = (f"base_results_dir={mount}/results", "export.run.model_train_name=llama", "evaluation.lambada.samples=4")
    model = (f"export.model.checkpoint_path={LLAMA}", f"deployment.command=[{sys.executable},{STAND_IN}]", *sizes)
    ended, calls = in_bcp_job(tmp_path, "stages=[export,deploy,evaluate]", "deployment.engine=vllm", *where, *model)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (served,) = [call for call in calls if "deployment.engines.serve" in call[-1]]
    assert served[:4] == ["--nnodes", nodes, "--npernode", "1"]
    (metrics,) = (mount / "results" / "llama").rglob("evaluation/lambada/metrics.json")
    assert json.loads(metrics.read_text())["samples"] == 4
    alive = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert alive == ""


def test_only_the_first_instance_starts_anything(tmp_path: Path, mount: Path) -> None:
    ended, calls = in_bcp_job(tmp_path, *guide_command(mount), index=1)
    assert ended.returncode == 0 and calls == []
    assert sorted(path.name for path in (mount / "results" / "gpt3_126m").iterdir()) == ["checkpoints"]


def test_a_job_with_too_few_nodes_is_refused(tmp_path: Path, mount: Path) -> None:
    arguments = [
        *guide_command(mount),
        "export.triton_deployment.pipeline_model_parallel_size=4",
        "stages=[export,deploy]",
    ]
    ended, calls = in_bcp_job(tmp_path, *arguments, "cluster.gpus_per_node=2", nodes=2)
    assert ended.returncode == 1 and "takes 4 nodes, but this job has 2" in ended.stderr
    assert calls == []


def test_outside_a_bcp_job_it_says_so(tmp_path: Path, mount: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NGC_")}
    ended = subprocess.run(
        [sys.executable, str(PROJECT / "main.py"), *guide_command(mount)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1 and "NGC_ARRAY_SIZE is not set" in ended.stderr


def test_the_first_failure_stops_the_chain_with_its_status(tmp_path: Path, mount: Path) -> None:
    (mount / "results" / "gpt3_126m" / "ft_tp2_fp16").mkdir()
    foreign = mount / "results" / "gpt3_126m" / "ft_tp2_fp16" / "2-gpu"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    ended, calls = in_bcp_job(tmp_path, *guide_command(mount))
    assert ended.returncode == 1 and "not made by Slipway" in ended.stderr
    assert calls == [] and (foreign / "thesis.txt").read_text() == "mine"


def test_hostile_words_reach_the_command_unchanged(tmp_path: Path, mount: Path) -> None:
    name = 'it\'s $(touch x) "quoted"; touch y'
    (mount / "results" / "gpt3_126m").rename(mount / "results" / name)
    escaped = name.replace('"', '\\"')
    ended, _ = in_bcp_job(tmp_path, *guide_command(mount), f'export.run.model_train_name="{escaped}"')
    assert ended.returncode == 0, ended.stderr
    assert (mount / "results" / name / "export_tp2_pp1_fp16_fp16" / "model_repo").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bcprun.jsonl", "mount"]


def test_the_fake_refuses_flags_that_bcprun_does_not_have(tmp_path: Path) -> None:
    environment = {**os.environ, "NGC_ARRAY_SIZE": "1", "FAKE_BCPRUN_LOG": str(tmp_path / "log")}
    argv = [str(PLACE / "bcprun"), "--nnodes", "1", "--container-image", "x", "--cmd", "true"]
    assert subprocess.run(argv, env=environment, capture_output=True, check=False).returncode == 2
