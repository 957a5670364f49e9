"""Processes that write into each other's memory add up what torch adds up, bit by bit the same in all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).resolve().parents[2]
SIZES = (8, 300, 8192, 9000, 64)  # numbers of one sum after another: of less than a program's share, and of several
# Every process has the memory of all mapped; the addresses that it goes by are its own.
PROGRAM = """
import sys
import torch
from backends.fastertransformer.engine.kernels.peer_sum import add_parts

directory, rank, size, most, *sizes = sys.argv[1], *map(int, sys.argv[2:])
words = 2 * size * most
memories = [torch.from_file(f"{directory}/memory{each}", True, words, dtype=torch.int64) for each in range(size)]
addresses, state = torch.tensor([each.data_ptr() for each in memories]), torch.zeros(1024, dtype=torch.int32)
inputs, found = torch.load(f"{directory}/inputs"), []
for count in sizes:
    x, parts = inputs[count]
    x = x.clone()
    add_parts(x, parts[rank].contiguous(), memories[rank], addresses, rank, state)
    found.append(x)
torch.save(found, f"{directory}/found{rank}")
"""


@pytest.mark.parametrize("size", [2, 3])
def test_processes_add_up_what_torch_adds_up(size: int, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU's own memory is tests/unit/test_engine_ranks_gpu.py's: no GPU is needed here")
    most = max(SIZES)
    for rank in range(size):
        (tmp_path / f"memory{rank}").write_bytes(bytes(2 * size * most * 8))
    inputs = {count: (torch.randn(count).half(), torch.randn(size, count)) for count in SIZES}
    torch.save(inputs, tmp_path / "inputs")
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    processes = [subprocess.Popen([*argv, *map(str, (rank, size, most, *SIZES))], cwd=PROJECT) for rank in range(size)]
    try:
        assert [process.wait(200) for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()
    found = [torch.load(tmp_path / f"found{rank}") for rank in range(size)]
    for index, count in enumerate(SIZES):
        x, parts = inputs[count]
        assert all(torch.equal(each[index], found[0][index]) for each in found)
        torch.testing.assert_close(found[0][index].double(), x.double() + parts.double().sum(0), rtol=2e-3, atol=2e-3)
