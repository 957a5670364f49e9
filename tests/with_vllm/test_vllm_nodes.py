"""vLLM itself, its build for CPUs, over two processes of this host that stand for two nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
LLAMA = PROJECT / "examples" / "llama_demo" / "checkpoints"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # both processes have the same processors
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
}
pytestmark = pytest.mark.timeout(3600)
TWO = ("deployment.nodes=2", "cluster.nodes=2")


def perplexity(root: Path, sizes: Sequence[str]) -> float:
    """LAMBADA's, of a run from the export on."""
    words = [sys.executable, str(PROJECT / "main.py"), "stages=[export,deploy,evaluate]", "cluster_type=interactive"]
    words += [f"base_results_dir={root}", f"export.model.checkpoint_path={LLAMA}", "export.run.model_train_name=tiny"]
    words += [
        "deployment.engine=vllm",
        f"deployment.command={os.environ['VLLM']} serve",
        "deployment.max_model_len=256",
    ]
    words += ["export.model.weight_data_type=fp32", "export.triton_deployment.data_type=fp32", *sizes]
    words += ["deployment.engine_args=[--enforce-eager]", "evaluation.lambada.samples=8"]
    ended = subprocess.run(
        [*words, "deployment.start_timeout_s=2400"],
        cwd=root,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    (file,) = root.glob("tiny/export_*/evaluation/lambada/metrics.json")
    metrics = {metric["name"]: metric["value"] for metric in json.loads(file.read_text())["metrics"]}
    return float(metrics["lambada_openai_perplexity"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> float:
    return perplexity(tmp_path_factory.mktemp("alone"), ())


@pytest.mark.parametrize(
    "sizes", [("export.model.tensor_model_parallel_size=2",), ("deployment.data_parallel_size=2",)]
)
def test_two_nodes_compute_what_one_does(tmp_path: Path, alone: float, sizes: tuple[str, ...]) -> None:
    assert perplexity(tmp_path, (*sizes, *TWO)) == pytest.approx(alone, rel=1e-3)
