"""OpenMP's threads, counted by the kernel and told by libgomp: too many, or too patient ones, cost seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.shards.gpt2_checkpoint import random_gpt2, write_shards

from backends.fastertransformer.engine.loading import load_steps
from backends.fastertransformer.engine.settings import Settings

PROJECT = Path(__file__).resolve().parent.parent.parent

ONE_ANSWER = """
import os, sys
from pathlib import Path
import numpy as np
import torch
from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.settings import Settings

def count_threads():
    return len(os.listdir("/proc/self/task"))

def answer(engine):
    ids, length = np.arange(40, dtype=np.uint32)[None] % 90, np.array([[40]], np.uint32)
    tensors = {"input_ids": ids, "input_lengths": length, "request_output_len": np.array([[4]], np.uint32)}
    engine.generate([engine.parse(tensors)])

torch.set_num_threads(3)  # starts two that are not OpenMP's
before = count_threads()
engine = open_engine(Settings(Path(sys.argv[1]), 1, 1, "fp32", cpu_threads=3), torch.device("cpu"))
answer(engine)
print(count_threads() - before)
engine.close()
"""
IMPORT_BACKEND = """
import sys, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
import backends.fastertransformer.model
"""


def run(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=PROJECT,
        env=environment | variables,
    )


def test_only_the_engines_thread_has_workers(tmp_path: Path) -> None:
    """Another thread's workers would make them more than the cores, and libgomp would put all to sleep at barriers."""
    gpt2 = random_gpt2(n_embd=256, n_layer=2, n_head=8)  # large enough that loading and generating want workers
    shards = write_shards(gpt2, tmp_path)
    assert run(ONE_ANSWER, str(shards)).stdout.split() == ["3"]  # the engine's own, and two workers


def test_the_backend_has_openmp_wait_briefly_before_torch_is_loaded() -> None:
    assert "GOMP_SPINCOUNT = '2000'" in run(IMPORT_BACKEND, OMP_DISPLAY_ENV="VERBOSE").stderr


def test_who_sets_how_openmp_waits_is_obeyed() -> None:
    told = run(IMPORT_BACKEND, OMP_DISPLAY_ENV="VERBOSE", GOMP_SPINCOUNT="70").stderr
    assert "GOMP_SPINCOUNT = '70'" in told


@pytest.mark.parametrize(("hidden", "rows", "threads"), [(64, 1, 1), (64, 4096, 3), (768, 1, 3)])
def test_small_products_are_made_by_one_thread(
    hidden: int, rows: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = write_shards(random_gpt2(n_embd=hidden, n_layer=1), tmp_path)
    before = torch.get_num_threads()
    try:
        steps, _ = load_steps(Settings(shards, 1, 1, "fp32", cpu_threads=3), torch.device("cpu"))
        seen = []
        monkeypatch.setattr(steps.network, "extend", lambda *_: seen.append(torch.get_num_threads()))
        steps.extend(np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.ones(rows, np.int64), 0)
        assert seen == [threads]
    finally:
        torch.set_num_threads(before)
