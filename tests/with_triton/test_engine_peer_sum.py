"""Processes that write into each other's memory add up and choose what torch does, bit by bit the same in all."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

SIZES = (8, 300, 8192, 9000, 64)  # numbers of one sum after another: of less than a program's share, and of several


def take_part(directory: Path, rank: int, size: int) -> None:
    """Be one of several processes. Each has the memory of all mapped; the addresses that it goes by are its own."""
    from backends.fastertransformer.engine.ops.kernels.all_reduce import PROGRAMS, all_reduce_add, all_reduce_argmax

    torch.set_num_threads(1)  # those of the process that was forked are not here
    words = 2 * size * max(SIZES)
    memories = [torch.from_file(f"{directory}/memory{each}", True, words, dtype=torch.int64) for each in range(size)]
    addresses = torch.tensor([each.data_ptr() for each in memories])
    turns, lost = torch.zeros(PROGRAMS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    inputs, found = torch.load(directory / "inputs"), list[Tensor]()
    for count in SIZES:
        x, parts = inputs[count]
        x = x.clone()
        all_reduce_add(x, parts[rank].contiguous(), memories[rank], addresses, rank, turns, lost)
        found.append(x)
    # The choices' memory begins behind the sums'.
    logits = inputs["logits"].tensor_split(size, 1)
    first, mine = sum(part.shape[1] for part in logits[:rank]), logits[rank].contiguous()
    words = 4 * size * 8
    choices = [torch.from_file(f"{directory}/choices{each}", True, words, dtype=torch.int64) for each in range(size)]
    addresses, turns = torch.tensor([each.data_ptr() for each in choices]), torch.zeros(8, dtype=torch.int32)
    for rows in (8, 3, 8):
        tokens = torch.where(mine[:, 0].isfinite(), mine.argmax(1), -1)[:rows].contiguous()
        ids = torch.full((rows,), 77)
        all_reduce_argmax(tokens, ids, mine[:rows].contiguous(), first, choices[rank], addresses, rank, turns, lost)
        found += [tokens, ids]
    found.append(lost)
    torch.save(found, directory / f"found{rank}")


# Of three one is padding, of two none.
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_processes_add_up_what_torch_adds_up(size: int, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU's own memory is tests/engine/test_engine_ranks.py's: no GPU is needed here")
    most = max(SIZES)
    for rank in range(size):
        (tmp_path / f"memory{rank}").write_bytes(bytes(2 * size * most * 8))
        (tmp_path / f"choices{rank}").write_bytes(bytes(4 * size * 8 * 8))
    inputs: dict[object, Any] = {count: (torch.randn(count).half(), torch.randn(size, count)) for count in SIZES}
    logits = inputs["logits"] = torch.randn(8, 50)
    logits[1, 3] = logits[1, 30] = logits[1, 49] = 9.0  # equals: the first is chosen
    logits[2] = float("nan")  # a row whose numbers are lost
    torch.save(inputs, tmp_path / "inputs")
    fork = multiprocessing.get_context("fork")  # what is imported already is not imported again
    processes = [fork.Process(target=take_part, args=(tmp_path, rank, size), daemon=True) for rank in range(size)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(200)
        assert [process.exitcode for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()
    found = [torch.load(tmp_path / f"found{rank}") for rank in range(size)]
    for index, count in enumerate(SIZES):
        x, parts = inputs[count]
        assert all(torch.equal(each[index], found[0][index]) for each in found)
        torch.testing.assert_close(found[0][index].double(), x.double() + parts.double().sum(0), rtol=2e-3, atol=2e-3)
    expected = logits.argmax(1)
    expected[2] = -1
    for each in found:
        *choices, lost = each[len(SIZES) :]
        assert lost.tolist() == [0]
        for rows, tokens, ids in zip((8, 3, 8), choices[::2], choices[1::2], strict=True):
            assert torch.equal(tokens, expected[:rows]) and torch.equal(ids, expected[:rows].clamp(min=0))
