"""What Megatron-Bridge's own tables make of a rank's parameters: the bytes that transformers saved.

The parameters are those that the independent writers of ``tests/support`` say a rank has, whose files the tests of
conversions convert to the same bytes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from with_megatron_core.bridge import DENSE, MODELS, source

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the tables in a process of their own, where packages that they never call are stood in for."""
    folder = tmp_path_factory.mktemp("bridge")
    words = [sys.executable, "-m", "with_megatron_core.bridge", str(folder)]
    ended = subprocess.run(
        words, cwd=TESTS, env={"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_are_transformers(name: str, made: Path) -> None:
    found = torch.load(made / f"{name}.pt")
    wanted = source(name).tensors
    if name == "qwen3_next":
        wanted = {key: value for key, value in wanted.items() if not key.startswith(DENSE)}
    assert sorted(found) == sorted(wanted)
    assert not [key for key, value in wanted.items() if not torch.equal(found[key], value)]
