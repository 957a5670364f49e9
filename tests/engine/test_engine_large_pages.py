"""Memory in large pages: the kernel's own record of what was asked for, and what shares a chunk."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from backends.fastertransformer.engine.large_pages import SharedPages, large_pages
from backends.fastertransformer.engine.ops.host.panels import Panels

PAGE = 2 << 20
HAS_THEM = Path("/sys/kernel/mm/transparent_hugepage").exists()


def record(memory: Tensor) -> dict[str, str]:
    """Return what the kernel says about the mapping that an address is in."""
    found, is_here = dict[str, str](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            start, end = (int(number, 16) for number in name.split("-"))
            is_here = start <= memory.data_ptr() < end
        elif is_here:
            found[name] = value.strip()
    return found


def taken_kb(memory: Tensor) -> int:
    """Return what of the mapping is the host's memory; others that lie beside it are the same mapping."""
    return int(record(memory)["Rss:"].split()[0])


def test_large_pages_are_asked_for_and_taken_where_written() -> None:
    memory = large_pages(300 << 20)
    assert memory.nbytes == 300 << 20 and memory.data_ptr() % PAGE == 0
    before = taken_kb(memory)
    memory[: 3 * PAGE] = 7
    assert ("hg" in record(memory)["VmFlags:"].split()) == HAS_THEM
    assert 6 << 10 <= taken_kb(memory) - before <= 8 << 10  # the last one may be taken before it is written to
    assert int(memory[: 3 * PAGE].sum()) == 7 * 3 * PAGE


def test_pieces_lie_one_behind_another_and_share_no_bytes() -> None:
    pages, sizes = SharedPages(), [5, 1 << 20, 64, 0, 20 << 20, 15 << 20, 33 << 20, 100]
    pieces = [pages.take(size) for size in sizes]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
        assert piece.data_ptr() % 64 == 0 or not len(piece)
    assert [len(piece) for piece in pieces] == sizes
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces))
    assert pieces[1].data_ptr() == pieces[0].data_ptr() + 64
    assert pieces[7].data_ptr() == pieces[5].data_ptr() + (15 << 20)  # what is large itself takes nothing of a chunk


def test_matrices_lie_in_large_pages() -> None:
    panels = Panels.of(torch.ones(32, 32))
    assert panels and ("hg" in record(panels.matrix)["VmFlags:"].split()) == HAS_THEM
