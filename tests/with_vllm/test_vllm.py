"""``deployment.engine=vllm`` with vLLM itself on a CPU, beside the drop-in engine: one checkpoint, one report."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
LLAMA = PROJECT / "examples" / "llama_demo" / "checkpoints"
SETTINGS = (
    "cluster_type=interactive",
    "export.run.model_train_name=tiny",
    "export.model.weight_data_type=fp32",
    "export.triton_deployment.data_type=fp32",
    "evaluation.lambada.samples=8",
    "evaluation.lambada.batch_size=4",
    "benchmark.batch_sizes=[1,2]",
    "benchmark.lengths=[[20,10]]",
    "benchmark.repeats=2",
    "deployment.max_model_len=512",
    "deployment.start_timeout_s=600",
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
}


def figures(results: Path) -> dict[str, float]:
    content = json.loads((results / "evaluation" / "lambada" / "metrics.json").read_text())
    return {metric["name"]: metric["value"] for metric in content["metrics"]}


def test_vllm_and_the_drop_in_engine_score_one_checkpoint_alike(tmp_path: Path) -> None:
    words = [sys.executable, str(PROJECT / "main.py"), "-m", "stages=[export,deploy,evaluate,benchmark]"]
    given = ("deployment.engine=slipway,vllm", f"deployment.command={os.environ['VLLM']} serve")
    where = (f"base_results_dir={tmp_path}", f"export.model.checkpoint_path={LLAMA}")
    ended = subprocess.run(
        [*words, *given, *where, *SETTINGS],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    ours, theirs = sorted(path for path in (tmp_path / "tiny").iterdir() if path.name.startswith("export_"))
    mine, other = figures(ours), figures(theirs)
    assert abs(mine["lambada_openai_perplexity"] / other["lambada_openai_perplexity"] - 1) < 1e-3
    assert mine["last_token_accuracy"] == other["last_token_accuracy"]
    with next(theirs.glob("benchmark/**/benchmark.csv")).open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["batch_size"] for row in rows] == ["1", "2"]
    assert all(float(row["throughput_tokens_per_s"]) > 0 and row["state"] == "ok" for row in rows)
    (report,) = (tmp_path / "sweeps").glob("*/report.md")
    assert all(f"engine {name}" in report.read_text() for name in ("slipway", "vllm"))
