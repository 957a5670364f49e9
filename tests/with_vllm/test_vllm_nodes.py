"""vLLM itself, its build for CPUs, over two processes of this host that stand for two nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from deployment.processes.linux import command_line, list_processes

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


RAY = ("deployment.distributed_executor=ray", "export.model.tensor_model_parallel_size=2")


def perplexity(root: Path, sizes: Sequence[str], given: Mapping[str, str] | None = None) -> float:
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
        env={**os.environ, **ENVIRONMENT, **(given or {})},
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


def test_two_nodes_of_ray_compute_what_one_does(tmp_path: Path, alone: float) -> None:
    """vLLM's platform for CPUs has no name for Ray's resource: a plugin of vLLM's own kind gives it that of GPUs."""
    plugin = tmp_path / "plugin"
    (plugin / "on_ray-1.0.dist-info").mkdir(parents=True)
    (plugin / "on_ray-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: on-ray\nVersion: 1.0\n")
    (plugin / "on_ray-1.0.dist-info" / "entry_points.txt").write_text("[vllm.platform_plugins]\non_ray = on_ray:find\n")
    (plugin / "on_ray.py").write_text("def find():\n    return 'on_ray_cpus.Platform'\n")
    (plugin / "on_ray_cpus.py").write_text(
        "from vllm.platforms.cpu import CpuPlatform\n\nclass Platform(CpuPlatform):\n    ray_device_key = 'GPU'\n"
    )
    found = perplexity(tmp_path, (*RAY, *TWO), {"PYTHONPATH": str(plugin)})
    assert found == pytest.approx(alone, rel=1e-3)
    (log,) = tmp_path.glob("tiny/export_*/deployment/server.log")
    said = log.read_text()
    assert "Connected to Ray cluster" in said and "RayWorkerProc" in said
    lines = [" ".join(command_line(process.pid)) for process in list_processes()]
    assert not [line for line in lines if "/ray/core/" in line or line.startswith("ray::")]
    assert not list(Path(tempfile.gettempdir()).glob("slipway-*/session_*"))
