"""``deployment.engine=sglang`` with SGLang itself on a CPU: a converted checkpoint, and what parity says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints.llama_files import write_huggingface_tokenizer
from support.tiny_models.llama_models import POSITIONS, save

HERE = Path(__file__).resolve().parent
SETTINGS = (
    *("cluster_type=interactive", "export.run.model_train_name=tiny", "export.model.weight_data_type=fp32"),
    *("export.triton_deployment.data_type=fp32", "evaluation=parity", "evaluation.parity.passages=16"),
    *(f"deployment.max_model_len={POSITIONS}", "deployment.max_num_seqs=8", "deployment.start_timeout_s=900"),
    "deployment.gpu_memory_utilization=0.5",  # of the memory that is free
    "deployment.engine_args=[--device,cpu,--attention-backend,torch_native,--max-total-tokens,'2048',"
    "--disable-overlap-schedule]",
)
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONPATH": str(HERE / "no_kernels"),
    "HF_HUB_OFFLINE": "1",
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
}


@pytest.mark.timeout(1800)
def test_parity_finds_the_source_in_what_sglang_serves(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save("qwen3_moe_alike", source)
    write_huggingface_tokenizer(source)
    given = ("deployment.engine=sglang", f"deployment.command={os.environ['SGLANG_PYTHON']} -m sglang.launch_server")
    where = (f"base_results_dir={tmp_path}", f"export.model.checkpoint_path={source}")
    words = [sys.executable, str(HERE.parents[1] / "main.py"), "stages=[convert,export,deploy,evaluate]"]
    ended = subprocess.run(
        [*words, *SETTINGS, *given, *where],
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
    assert (found["verdict"], found["engine"]) == ("HOLDS", "sglang")
    assert found["max_log_prob_difference"] < 1e-4 and found["passage_log_prob_difference"] < 1e-4
