"""main.py as a user meets it: help, the configuration, and one clear error for each mistake."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints.nemo_archive import gpt_state, write_gpt
from support.torture.command_line_server import CommandLines

from handover.endpoint import Endpoint

PROJECT = Path(__file__).resolve().parents[2]
NEMO = PROJECT / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"


def slipway(*arguments: str, cwd: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NGC_", "SLURM_"))}
    return subprocess.run(
        [sys.executable, str(PROJECT / "main.py"), "cluster_type=interactive", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def lines() -> Iterator[CommandLines]:
    """Many command lines, of a main.py that is imported once."""
    server = CommandLines()
    yield server
    server.close()


def forked(lines: CommandLines, *arguments: str) -> subprocess.CompletedProcess[str]:
    ended = lines.run("cluster_type=interactive", *arguments, cwd=PROJECT, limit_s=120)
    return subprocess.CompletedProcess(arguments, ended.status, ended.out, ended.err)


def run_of(tmp_path: Path, *arguments: str, checkpoint: Path = NEMO) -> tuple[str, ...]:
    where = (f"base_results_dir={tmp_path / 'results'}", f"export.model.checkpoint_path={checkpoint}")
    return (*where, "export.run.model_train_name=tiny", *arguments)


def assert_refused(result: subprocess.CompletedProcess[str], tmp_path: Path, *words: str) -> None:
    """One message that has all the words, status 1 or 2, no traceback, and nothing written."""
    assert result.returncode in (1, 2), result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr
    assert not (tmp_path / "results").exists()


def test_help_shows_stages_groups_and_five_commands() -> None:
    text = slipway("--help").stdout
    for word in ("convert", "export", "deploy", "evaluate", "benchmark", "export/gpt3: export_gpt3", "cluster: bcm"):
        assert word in text
    assert text.count("\n  python main.py ") == 5


def test_hydras_own_flags_work() -> None:
    assert "gpus_per_node: 8" in slipway("--cfg", "job").stdout
    assert slipway("--info").returncode == 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages=[exprt]", ["'exprt'", "did you mean 'export'?", "benchmark, convert, deploy, evaluate, export"]),
        ("stages=[conversion]", ["the stage is called 'convert'"]),
        ("stages=[evaluation]", ["the stage is called 'evaluate'"]),
        ("stages=[]", ["no stages", "stages=["]),
        ("stages=export", ["stages is a list", "stages=[a,b]"]),
        ("exprt", ["cannot read 'exprt'", "a setting is key=value"]),
        ("stagse=[export]", ["unknown key 'stagse'", "did you mean 'stages'?"]),
        ("export.model.tensor_parallel_size=2", ["below export.model", "did you mean 'tensor_model_parallel_size'?"]),
        ("+export.model.extra=2", ["unknown key 'extra'", "checkpoint_path"]),
        ("cluster=slurm", ["no cluster=slurm", "bcm, bcp, interactive"]),
        ("export=gpt3/export_gpt", ["no export=gpt3/export_gpt", "did you mean 'gpt3/export_gpt3'?"]),
        ("export.model.weight_data_type=fp8", ["no 'fp8'", "bf16, fp16, fp32"]),
        ("export.triton_deployment.data_type=int8", ["no 'int8'", "bf16, fp16, fp32"]),
        ("export.triton_deployment.max_batch_size=many", ["max_batch_size", "many"]),
        ("export.triton_deployment.max_batch_size=0", ["max_batch_size is 0", "at least 1"]),
        ("export.triton_deployment.interactive_sessions=-1", ["interactive_sessions is -1", "at least 0"]),
        ("export.triton_deployment.interactive_sessions=4", ["stateful store", "evaluate", "interactive_sessions=0"]),
        ("benchmark.lengths=[[60]]", ["benchmark.lengths", "[input, output]"]),
        ("export.run.model_train_name=a/b", ["a/b"]),
        ("export.run.model_train_name=ensemble", ["ensemble"]),
        ("deployment.endpoint=nowhere", ["nowhere", "host:port"]),
        ("evaluation.lambada.data_path=/nowhere.jsonl", ["/nowhere.jsonl"]),
        ("evaluation.lambada.samples=0", ["evaluation.lambada.samples is 0", "at least 1"]),
        ("evaluation.squad.samples=3", ["squad is no evaluation of this run", "evaluation=[squad]"]),
        ("evaluation.lambada.sample=3", ["below evaluation.lambada", "did you mean 'samples'?"]),
        ("evaluation=[lambada,squad]", ["evaluation.squad", "dev-v1.1.json cannot be read"]),
        ("evaluation=translation", ["evaluation.translation.data_path is not set"]),
        ("evaluation=[lambada,squat]", ["did you mean 'squad'?"]),
        ("evaluation=gpt3/evaluate_all", ["it is evaluation=lambada here", "evaluation.harness"]),
        ("evaluation.run.tasks=all_tasks", ["all_tasks, which is not chosen", "legal: lambada", "evaluation.harness"]),
        ("evaluation.run.tasks=[lambada,squad]", ["evaluation=[lambada,squad]"]),
        ("evaluation.model.eval_batch_size=0", ["evaluation.model.eval_batch_size is 0", "at least 1"]),
        ("evaluation.model.nemo_model=/x.nemo", ["'nemo_model'", "export.model.checkpoint_path"]),
        ("evaluation.trainer.devices=8", ["'trainer'", "there is no trainer"]),
        ("container=nvcr.io/image", ["starts no container"]),
    ],
)
def test_a_mistake_is_named_with_what_is_legal(
    lines: CommandLines, tmp_path: Path, override: str, words: list[str]
) -> None:
    stages = () if override.startswith("stages") else ("stages=[export,deploy,evaluate]",)
    assert_refused(forked(lines, *run_of(tmp_path, *stages, override)), tmp_path, *words)


def test_a_tensor_parallel_size_that_does_not_divide_the_heads(lines: CommandLines, tmp_path: Path) -> None:
    arguments = run_of(tmp_path, "stages=[export]", "export.model.tensor_model_parallel_size=3")
    assert_refused(forked(lines, *arguments), tmp_path, "4 heads", "1, 2, 4")


def test_gpus_that_do_not_fit(lines: CommandLines, tmp_path: Path) -> None:
    parallel = ("export.model.tensor_model_parallel_size=4", "export.triton_deployment.pipeline_model_parallel_size=3")
    arguments = run_of(tmp_path, "stages=[export,deploy]", "cluster.gpus_per_node=8", *parallel)
    assert_refused(forked(lines, *arguments), tmp_path, "12 GPUs", "nodes of 8")
    arguments = run_of(tmp_path, "stages=[export,deploy]", "cluster.gpus_per_node=2", parallel[0])
    assert_refused(forked(lines, *arguments), tmp_path, "2 nodes of 2 GPUs", "cluster.nodes")


def test_a_missing_checkpoint(lines: CommandLines, tmp_path: Path) -> None:
    arguments = run_of(tmp_path, "stages=[export]", checkpoint=tmp_path / "none.nemo")
    assert_refused(forked(lines, *arguments), tmp_path, "none.nemo")


def test_a_truncated_checkpoint(lines: CommandLines, tmp_path: Path) -> None:
    damaged = tmp_path / "cut.nemo"
    damaged.write_bytes(NEMO.read_bytes()[:600_000])
    assert_refused(forked(lines, *run_of(tmp_path, "stages=[export]", checkpoint=damaged)), tmp_path, "cut.nemo")


def test_several_checkpoints_in_a_directory(lines: CommandLines, tmp_path: Path) -> None:
    for name in ("one.nemo", "two.nemo"):
        shutil.copy(NEMO, tmp_path / name)
    assert_refused(
        forked(lines, *run_of(tmp_path, "stages=[export]", checkpoint=tmp_path)), tmp_path, "one.nemo", "two.nemo"
    )


def test_a_member_that_escapes_its_directory(lines: CommandLines, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile.nemo"
    with tarfile.open(hostile, "w") as archive:
        archive.add(NEMO, "../../escaped")
    assert_refused(forked(lines, *run_of(tmp_path, "stages=[export]", checkpoint=hostile)), tmp_path, "escape")


def test_weights_that_overflow_fp16(tmp_path: Path) -> None:
    state = gpt_state()
    state["model.language_model.encoder.layers.1.mlp.dense_4h_to_h.weight"][2, 3] = 1e5
    checkpoint = write_gpt(tmp_path / "large.nemo", state)
    arguments = run_of(tmp_path, "stages=[export]", checkpoint=checkpoint)
    result = slipway(*arguments)
    assert result.returncode == 1
    assert "layers.1.mlp.dense_4h_to_h.weight overflows fp16: its largest magnitude is" in result.stdout + result.stderr
    made = [path.name for path in (tmp_path / "results/tiny/ft_tp1_fp16").iterdir() if path.is_dir()]
    assert made == ["1-gpu.partial"], "only a conversion reads weights, and it leaves nothing that looks finished"


def test_an_architecture_that_gpt_of_fastertransformer_cannot_express(lines: CommandLines, tmp_path: Path) -> None:
    changes = {"position_embedding_type": "kerple", "activation": "fast-swiglu"}
    checkpoint = write_gpt(tmp_path / "rotary.nemo", **changes)
    arguments = run_of(tmp_path, "stages=[export]", checkpoint=checkpoint)
    assert_refused(forked(lines, *arguments), tmp_path, "position_embedding_type", "activation")


def test_a_port_in_use(lines: CommandLines, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        arguments = run_of(tmp_path, "stages=[export,deploy]", f"deployment.http_port={port}")
        assert_refused(forked(lines, *arguments), tmp_path, f"http_port={port}", "0 for a free one")


def test_a_results_directory_that_cannot_be_written(lines: CommandLines, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    arguments = (*run_of(tmp_path, "stages=[export]"), f"base_results_dir={in_the_way}/results")
    assert_refused(forked(lines, *arguments), tmp_path, str(in_the_way))


def test_stages_that_need_an_earlier_one(lines: CommandLines, tmp_path: Path) -> None:
    assert_refused(
        forked(lines, *run_of(tmp_path, "stages=[deploy]")), tmp_path, "no model repository", "export,deploy"
    )
    assert_refused(forked(lines, *run_of(tmp_path, "stages=[benchmark]")), tmp_path, "nothing is deployed", "deploy")


def test_the_server_of_the_original_is_not_asked_for_a_copy_of_the_results(tmp_path: Path) -> None:
    run = tmp_path / "original" / "tiny" / "export_tp1_pp1_fp16_fp16"
    (run / "model_repo").mkdir(parents=True)
    (run / "deployment").mkdir()
    Endpoint("127.0.0.1", grpc_port=1, model_repository=str(run / "model_repo")).write(
        run / "deployment" / "endpoint.json"
    )
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    evaluate = ("stages=[evaluate]", "dry_run=true", *run_of(tmp_path)[1:])
    assert slipway(f"base_results_dir={tmp_path / 'original'}", *evaluate).returncode == 0
    refused = slipway(f"base_results_dir={tmp_path / 'copy'}", *evaluate)
    assert_refused(refused, tmp_path, f"that of {run / 'model_repo'}", "add deploy to stages")


def test_dry_run_prints_every_command_and_touches_nothing(tmp_path: Path) -> None:
    stages = "stages=[convert,export,deploy,evaluate,benchmark]"
    result = slipway(*run_of(tmp_path, stages, "dry_run=true"))
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if line.startswith("--- ")] == [
        f"--- {stage}" for stage in ("convert", "export", "deploy", "evaluate", "benchmark", "report")
    ]
    assert result.stdout.count("\n$ ") == 6
    assert not (tmp_path / "results").exists()


def test_export_brings_convert_along_and_a_rerun_skips_both(tmp_path: Path) -> None:
    name = 'it\'s "quoted"; touch x'
    arguments = (*run_of(tmp_path, "stages=[export]"), 'export.run.model_train_name="it\'s \\"quoted\\"; touch x"')
    first = slipway(*arguments, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    root = tmp_path / "results" / name
    assert (root / "export_tp1_pp1_fp16_fp16" / "model_repo" / name / "config.pbtxt").is_file()
    assert (root / "ft_tp1_fp16" / "1-gpu" / "config.ini").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results"]
    second = slipway(*arguments, cwd=tmp_path)
    assert second.stdout.count("skipped") == 2
    forced = slipway(*arguments, "force=[export]", cwd=tmp_path)
    assert forced.stdout.count("skipped") == 1 and forced.returncode == 0


def test_export_alone_works_when_only_the_ft_checkpoint_is_left(tmp_path: Path) -> None:
    checkpoint = tmp_path / "moved.nemo"
    shutil.copy(NEMO, checkpoint)
    assert slipway(*run_of(tmp_path, "stages=[convert]", checkpoint=checkpoint)).returncode == 0
    checkpoint.unlink()
    result = slipway(*run_of(tmp_path, "stages=[export]", checkpoint=checkpoint))
    assert result.returncode == 0 and "convert" not in result.stdout
    other = slipway(*run_of(tmp_path, "stages=[export]", checkpoint=tmp_path / "mvoed.nemo"))
    assert other.returncode == 1 and "mvoed.nemo does not exist, and " in other.stderr
    assert f"was made from {checkpoint}" in other.stderr
