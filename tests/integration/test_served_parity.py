"""The whole way from a Hugging Face checkpoint to a verdict, through the real tritonserver; and a planted defect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.tiny_models.huggingface_models import HEADS, HIDDEN, save

from handover.digests import file_digest
from handover.manifest import Manifest

PROJECT = Path(__file__).resolve().parents[2]
RANKS = 2
QKV = "model.layers.1.attention.query_key_value.weight.1.bin"


def launch(stages: str, root: Path) -> subprocess.CompletedProcess[str]:
    overrides = [
        *(
            f"stages=[{stages}]",
            "evaluation=parity",
            "cluster_type=interactive",
            f"base_results_dir={root / 'results'}",
        ),
        *(f"export.model.checkpoint_path={root / 'source'}", "export.run.model_train_name=tiny"),
        *(f"export.model.tensor_model_parallel_size={RANKS}", "cluster.gpus_per_node=0"),
        *("export.model.weight_data_type=fp32", "export.triton_deployment.data_type=fp32"),
        *("export.triton_deployment.max_batch_size=4", "evaluation.parity.output_length=8"),
    ]
    command = [sys.executable, "main.py", *overrides]
    environment = {**os.environ, "SLIPWAY_CPU_THREADS": "1"}
    return subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=200)


def reseal(directory: Path) -> None:
    """Make a manifest true again, as somebody would whose own tools wrote the shards."""
    manifest = Manifest.read(directory)
    files = (replace(file, digest=file_digest(directory / file.path, file.digest)) for file in manifest.files)
    replace(manifest, files=tuple(files)).write(directory)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    save("gpt2", root / "source", n_positions=48)
    return root


def results_of(root: Path) -> Path:
    (results,) = (root / "results" / "tiny").glob("export_*")
    return results


# In CI the parity of a server is asked through its API (test_evaluation_over_openai.py), a defect is planted in shards
# that an engine serves (tests/evaluation/test_parity.py), and a stage's verdict is main.py's (test_pipeline.py's gate).
@pytest.mark.long
def test_a_sound_deployment_holds_and_two_heads_swapped_in_one_shard_do_not(run: Path) -> None:
    sound = launch("convert,export,deploy,evaluate", run)
    assert sound.returncode == 0, sound.stdout + sound.stderr
    results = results_of(run)
    summary = json.loads((results / "evaluation" / "parity" / "summary.json").read_text())
    assert summary["verdict"] == "HOLDS" and "transformers" in summary["source"]["computed_by"]
    assert "Parity holds against Hugging Face" in (results / "report" / "report.md").read_text()

    repository = results / "model_repo"
    shards = sorted(repository.glob(f"*/1/{RANKS}-gpu"))
    for path in (directory / QKV for directory in shards):
        weight = np.fromfile(path, "<f4").reshape(HIDDEN, 3, HEADS // RANKS, HIDDEN // HEADS)
        weight[:, 0, [0, 1]] = weight[:, 0, [1, 0]]
        path.unlink()  # the file is linked to the FT checkpoint and to the other model's
        weight.tofile(path)
    for directory in (*shards, repository):
        reseal(directory)

    planted = launch("deploy,evaluate", run)
    assert "proved" in planted.stdout  # every digest is right
    assert planted.returncode == 1 and "the served model is not its source" in planted.stdout + planted.stderr
    left = json.loads((results / "evaluation" / "parity.partial" / "summary.json").read_text())
    assert left["verdict"] == "FAILS" and left["first_difference"] is not None
    assert left["model_digest"] == Manifest.read(repository).digest != summary["model_digest"]
    page = (results / "report" / "report.html").read_text()
    assert "The evaluation parity fails: " in page and "Parity holds" not in page
