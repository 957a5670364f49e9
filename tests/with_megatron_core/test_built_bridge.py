"""Checkpoints that Megatron-Bridge itself saves of built models, converted here and by its own export.

Both give the bytes that transformers saved, which Bridge filled the models with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.tiny_models.llama_models import tensors
from with_megatron_core.built_bridge import MODELS

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run Bridge in a process of its own, where packages that are built for GPUs are stood in for."""
    folder = tmp_path_factory.mktemp("bridge")
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "with_megatron_core.built_bridge", str(folder)],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_its_checkpoint_becomes_what_its_own_export_writes(name: str, made: Path, tmp_path: Path) -> None:
    convert(ConvertArguments(made / name / "megatron", tmp_path / "ours", 1, "fp32", format="huggingface"))
    wanted = tensors(made / name / "hub")
    for folder in (made / name / "back", tmp_path / "ours"):
        found = tensors(folder)
        assert sorted(found) == sorted(wanted)
        assert not [key for key, value in wanted.items() if not torch.equal(found[key], value)]
