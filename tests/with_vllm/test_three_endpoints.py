"""One report over three endpoints of one checkpoint: Triton's gRPC, Slipway's OpenAI API, and vLLM itself on a CPU."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.servers.served import wait_for

from handover.endpoint import Endpoint

PROJECT = Path(__file__).resolve().parents[2]
LLAMA = PROJECT / "examples" / "llama_demo" / "checkpoints"
SETTINGS = (
    *("cluster_type=interactive", "export.run.model_train_name=tiny", f"export.model.checkpoint_path={LLAMA}"),
    *("export.model.weight_data_type=fp32", "export.triton_deployment.data_type=fp32"),
    *("deployment.max_model_len=512", "deployment.start_timeout_s=1500"),
)
TASKS = (
    *("evaluation=[lambada,parity]", "evaluation.lambada.samples=8", "evaluation.lambada.batch_size=4"),
    *("evaluation.parity.passages=16", "benchmark.batch_sizes=[1,2]", "benchmark.lengths=[[20,10]]"),
    "benchmark.repeats=3",
)
LOAD = (
    *("benchmark=load", "benchmark.load.concurrencies=[1,2,4]", "benchmark.load.lengths=[20/10]"),
    *("benchmark.load.requests=12", "benchmark.load.repeats=2", "benchmark.load.min_repeats=2"),
)
ENVIRONMENT = {
    **os.environ,
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
}


def command(root: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(PROJECT / "main.py"), *arguments, *SETTINGS, f"base_results_dir={root}"]


@contextmanager
def serving(root: Path, name: str, *arguments: str) -> Iterator[None]:
    """A server that main.py has started and keeps until Ctrl-C."""
    output = root / f"{name}.txt"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command(root, *arguments), cwd=root, env=ENVIRONMENT, stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        wait_for(lambda: " serving " in output.read_text() or process.poll() is not None, 1800)
        assert process.poll() is None, output.read_text()
        yield
        process.send_signal(signal.SIGINT)
        assert process.wait(180) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()


def sweep(root: Path, endpoints: list[str], *arguments: str) -> Path:
    """Measure all endpoints by one command; gives the directory of its report."""
    words = command(root, "-m", *arguments, f"deployment.endpoint={','.join(endpoints)}")
    ended = subprocess.run(words, cwd=root, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=1800)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return max((root / "sweeps").iterdir())


@pytest.mark.timeout(5400)
def test_three_endpoints_of_one_checkpoint_stand_in_one_report(tmp_path: Path) -> None:
    own = ("stages=[convert,export,deploy]", "deployment.openai_port=0", "export.triton_deployment.decoupled=true")
    vllm = (
        *("stages=[export,deploy]", "deployment.engine=vllm", f"deployment.command={os.environ['VLLM']} serve"),
        "deployment.engine_args=[--enforce-eager]",
    )
    with serving(tmp_path, "slipway", *own), serving(tmp_path, "vllm", *vllm):
        first, second = sorted(path.relative_to(tmp_path) for path in tmp_path.glob("tiny/*/deployment/endpoint.json"))
        url = f"http://127.0.0.1:{Endpoint.read(tmp_path / first).openai_port}/v1"
        endpoints = [str(first), url, str(second)]
        sweep(tmp_path, endpoints, "stages=[evaluate,benchmark]", *TASKS)
        report = sweep(tmp_path, endpoints, "stages=[benchmark]", *LOAD)
    with (report / "points.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["engine"] for row in rows] == ["slipway"] * 10 + ["vllm"] * 5
    assert {(row["parity"], row["is_comparable"], row["error"]) for row in rows} == {("HOLDS", "True", "")}
    assert {row["load"] for row in rows} == {"batch 1", "batch 2", *(f"concurrency {number}" for number in (1, 2, 4))}
    assert all(float(row["tokens_per_s"]) > 0 and float(row["e2e_p50_ms"]) > 0 for row in rows)
    perplexities = [
        {each["name"]: each["value"] for each in json.loads((results / "metrics.json").read_text())["metrics"]}
        for results in sorted(tmp_path.glob("tiny/*/evaluation/lambada"))
    ]
    assert len(perplexities) == 3
    figures = [each["lambada_openai_perplexity"] for each in perplexities]
    assert max(figures) / min(figures) - 1 < 1e-3
    assert len({each["last_token_accuracy"] for each in perplexities}) == 1
    text = (report / "report.md").read_text()
    assert "not comparable" not in text and "The engines" in text and f"endpoint {url}" in text
