"""What each program of attention to cached cells has: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cut(
    rows: list[tuple[int, int]], kv_heads: int, at_once: int, reach: int = 1 << 30, **limits: int
) -> tuple[list[list[int]], int]:
    """Cut rows of cells before and tokens into blocks of 16 tokens -> what each program does, and the most places."""
    from backends.fastertransformer.engine.ops.kernels.row_blocks import PackedRows, Reads, Split

    counts = torch.tensor([0, *(count for _, count in rows)], device=DEVICE)
    positions = torch.tensor([before + place for before, count in rows for place in range(count)], device=DEVICE)
    packed = PackedRows(counts.cumsum(0, dtype=torch.int32), len(positions), 1 << 13, sum(n > 1 for _, n in rows))
    blocks, places = packed.cut(16, Reads(positions, reach, kv_heads, at_once, Split(**limits)))
    return [block for block in blocks.tolist() if block[1]], places


@pytest.mark.parametrize(
    ("rows", "reach", "parts"),
    [
        ([(200, 1)] * 4 + [(7968, 60)], 1 << 30, [2]),  # 128 programs without a split, and 264 at once: two pieces
        ([(200, 1)] * 4 + [(7968, 48)], 1 << 30, [5]),  # 96: five pieces in two turns are faster than two in one
        ([(7968, 16)], 1 << 30, [8]),
        ([(7968, 16)], 1020, [2]),  # no piece has fewer than 512 cells
        ([(7968, 120)], 1 << 30, [1]),  # 256: two pieces would take two turns
        ([(7968, 150)], 1 << 30, [1]),
        ([(8000, 30), (100, 30), (0, 8)], 1 << 30, [4, 1, 1]),
        ([(100, 30), (900, 90)], 1 << 30, [1, 1]),
    ],
)
def test_the_cells_of_few_blocks_are_shared_by_as_many_programs_as_run_at_once(
    rows: list[tuple[int, int]], reach: int, parts: list[int]
) -> None:
    blocks, _ = cut(rows, 32, 264, reach)
    longer = [count for _, count in rows if count > 1]
    assert {(length, most) for _, length, _, _, most, _ in blocks} == set(zip(longer, parts, strict=True))


def test_programs_have_each_piece_of_each_block_once_and_places_of_their_own() -> None:
    draw = random.Random(0)
    numbers = set()
    for _ in range(5):
        rows = [(draw.choice((0, 50, 700)), draw.choice((0, 1, 2, 17, 40))) for _ in range(draw.randrange(1, 8))]
        blocks, most = cut([*rows, (300, 5)], 2, 24, least=32, cost=1)
        begins = [0, *accumulate(count for _, count in [*rows, (300, 5)])]
        pieces, places = list[tuple[int, ...]](), list[int]()
        for begin, length, start, piece, parts, place in blocks:
            numbers.add(parts)
            pieces.append((begin, length, start, piece))
            places += [place] if parts > 1 else []
            assert piece == 0 or pieces[-2] == (begin, length, start, piece - 1)  # the last of them merges
        assert places == list(range(len(places))) and len(places) <= most
        per_row = {begin: max(each[4] for each in blocks if each[0] == begin) for begin, *_ in blocks}
        assert sorted(pieces) == sorted(
            (begin, count, start, piece)
            for begin, (_, count) in zip(begins, [*rows, (300, 5)], strict=False)
            if count > 1
            for start in range(0, count, 16)
            for piece in range(per_row[begin])
        )
    assert 1 in numbers and len(numbers) > 3
