"""``deployment.engine=vllm`` from the checkpoint to the report, with a stand-in for its program that computes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.engine_programs import PATH, PLACE
from support.servers.served import wait_for

PROJECT = Path(__file__).resolve().parents[2]
LLAMA = PROJECT / "examples" / "llama_demo" / "checkpoints"
SMALL = ("evaluation.lambada.samples=4", "evaluation.lambada.batch_size=4", "export.run.model_train_name=tiny")
FP32 = ("export.model.weight_data_type=fp32", "export.triton_deployment.data_type=fp32")


def command(root: Path, *arguments: str) -> list[str]:
    where = (f"base_results_dir={root}", f"export.model.checkpoint_path={LLAMA}", "cluster_type=interactive")
    return [sys.executable, str(PROJECT / "main.py"), *arguments, *where, *SMALL, *FP32]


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": PATH}
    words = command(root, *arguments)
    return subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=300)


def figures(results: Path) -> dict[str, float]:
    content = json.loads((results / "evaluation" / "lambada" / "metrics.json").read_text())
    return {metric["name"]: metric["value"] for metric in content["metrics"]}


@pytest.mark.long
def test_a_sweep_over_engines_makes_the_directory_once_and_scores_the_same_weights(tmp_path: Path) -> None:
    """The drop-in engine and the other one compute LAMBADA's figures from one checkpoint: they agree in fp32."""
    ended = run(tmp_path, "-m", "stages=[export,deploy,evaluate]", "deployment.engine=slipway,vllm,sglang",
                f"deployment.command=[python3,{PLACE}/vllm,--model,'{{model}}']")  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line for line in ended.stdout.splitlines() if "] convert " in line and "running" not in line]
    assert [line.split()[2] for line in lines] == ["done", "done", "skipped"], ended.stdout
    results = sorted(path for path in (tmp_path / "tiny").iterdir() if path.name.startswith("export_"))
    names = [path.name.removeprefix("export_tp1_pp1_fp32_fp32") for path in results]
    assert names == ["", "_sglang", "_vllm"]
    (report,) = (tmp_path / "sweeps").glob("*/report.md")
    text = report.read_text()
    assert all(f"engine {name}" in text for name in ("slipway", "vllm", "sglang"))
    ours, other, third = (figures(path) for path in results)
    assert other == third
    assert abs(ours["lambada_openai_perplexity"] / other["lambada_openai_perplexity"] - 1) < 1e-5
    assert ours["last_token_accuracy"] == other["last_token_accuracy"]
    assert not [line for line in processes() if str(tmp_path) in line]


def test_a_server_alone_serves_until_ctrl_c(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    words = command(tmp_path, "stages=[export,deploy]", "deployment.engine=trtllm_serve",
                    f"deployment.command=python3 {PLACE}/vllm")  # fmt: skip
    with output.open("wb") as stream:
        environment = {**os.environ, "PATH": PATH}
        process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: "serving    TensorRT-LLM 0.0.1" in output.read_text() or process.poll() is not None)
        assert process.poll() is None, output.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(240) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    assert "the server was stopped" in output.read_text()
    assert not list((tmp_path / "tiny").glob("*/deployment/endpoint.json"))
    assert not [line for line in processes() if str(tmp_path) in line]


def processes() -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
