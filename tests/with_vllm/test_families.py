"""Mixtures and latent attention: converted, served by vLLM itself on a CPU.

Parity compares with transformers: on the source if it is a directory of the hub, else on the source read again.

vLLM's kernels for CPUs want heads in multiples of 32 and a hidden size that 32 divides, and of latent attention
DeepSeek's size alone: 512 latent numbers and 64 that rotate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.llama_configs import bridge, padded_vocabulary
from support.checkpoints.llama_files import chunked, write_bridge_tree, write_huggingface_tokenizer, write_torch_dist
from support.checkpoints.llama_state import core_state
from support.tiny_models import llama_models
from support.tiny_models.llama_models import tensors

PROJECT = Path(__file__).resolve().parents[2]
POSITIONS = 128  # as far as the model's yarn reaches, 8 times 16: vLLM has no more angles
SETTINGS = (
    *("cluster_type=interactive", "export.run.model_train_name=tiny", "export.model.weight_data_type=fp32"),
    *("export.triton_deployment.data_type=fp32", "evaluation=parity", "evaluation.parity.passages=16"),
    *(f"deployment.max_model_len={POSITIONS}", "deployment.start_timeout_s=600"),
    "deployment.engine_args=[--enforce-eager]",
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
AGAIN = "read again from the source"


def hub(name: str, folder: Path, **changes: Any) -> Path:
    llama_models.save(name, folder, max_position_embeddings=POSITIONS, **changes)
    write_huggingface_tokenizer(folder)
    return folder


def torch_dist(name: str, folder: Path, **changes: Any) -> Path:
    """A run of Megatron-Bridge."""
    config = llama_models.save(name, folder / "hub", max_position_embeddings=POSITIONS, **changes).config
    state = core_state(tensors(folder / "hub"), config, padded_vocabulary(config, 1))
    weights = write_bridge_tree(folder / "run", bridge(config))
    write_torch_dist(weights, chunked(state, 1, is_stacked=False), "", {"iteration": 7})
    return folder / "run"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "write", "changes"),
    [
        ("qwen3_moe", hub, {"head_dim": 32}),
        ("deepseek_v3", torch_dist, LATENT),
    ],
)
def test_vllm_computes_what_the_source_does(
    name: str, write: Callable[..., Path], changes: dict[str, Any], tmp_path: Path
) -> None:
    source = write(name, tmp_path / "source", **changes)
    words = [sys.executable, str(PROJECT / "main.py"), "stages=[convert,export,deploy,evaluate]", *SETTINGS]
    given = ("deployment.engine=vllm", f"deployment.command={os.environ['VLLM']} serve")
    where = (f"base_results_dir={tmp_path}", f"export.model.checkpoint_path={source}")
    ended = subprocess.run(
        [*words, *given, *where],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
        timeout=1700,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    (summary,) = tmp_path.glob("tiny/*/evaluation/parity/summary.json")
    found = json.loads(summary.read_text())
    assert (found["verdict"], found["engine"]) == ("HOLDS", "vllm")
    assert found["max_log_prob_difference"] < 1e-4 and found["passage_log_prob_difference"] < 1e-4
    computed_by = found["source"]["computed_by"]
    assert "transformers" in computed_by and (AGAIN in computed_by) == (write is torch_dist)
