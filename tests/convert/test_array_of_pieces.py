"""Arrays in pieces of any pattern, read through views of any kind, against the array itself."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import FP4_VALUES

from export_scripts.checkpoints.files.chunked import Chunk, ChunkedTensor
from export_scripts.conversion.move.placement import assemble
from export_scripts.conversion.move.transposition import Transposer
from export_scripts.tensors.array_of_pieces import array_of_pieces, box_around, columns_in_order, runs_in_order
from export_scripts.tensors.dtypes import STORAGE, widen
from export_scripts.tensors.low_rank import LowRankSum
from export_scripts.tensors.mapped import Reader, map_record
from export_scripts.tensors.scaled import Scaled
from export_scripts.tensors.small_floats import E4M3, FP4
from export_scripts.weights.layouts import qkv_by_group_to_block
from export_scripts.weights.schema import Assignment, ModelDims, Rule
from ft_format.layout import TensorSpec
from handover.errors import CheckpointError


def cut(array: np.ndarray, rng: np.random.Generator, depth: int) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Cut an array in two, again and again, at any place of any axis."""
    axes = [axis for axis in range(array.ndim) if array.shape[axis] > 1]
    if not depth or not axes:
        return [((0,) * array.ndim, array)]
    axis = int(rng.choice(axes))
    at = int(rng.integers(1, array.shape[axis]))
    halves = np.split(array, [at], axis)
    pieces = cut(halves[0], rng, depth - 1)
    for start, piece in cut(halves[1], rng, depth - 1):
        pieces.append(((*start[:axis], start[axis] + at, *start[axis + 1 :]), piece))
    return pieces


def stored(piece: np.ndarray, path: Path) -> np.ndarray:
    """The piece as a mapped file with its checksum."""
    content = np.ascontiguousarray(piece).tobytes()
    path.write_bytes(content)
    return map_record(path, 0, len(content), zlib.crc32(content)).view(piece.dtype).reshape(piece.shape)


def views(array: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Views as layouts and crops make them: axes turned, split and merged, ranges and steps of them."""
    split = array.reshape(-1, 2 if array.shape[0] % 2 == 0 else 1, *array.shape[1:])
    found = [array, array.T, split, split.swapaxes(0, 1), split.T, array.reshape(-1), array[-1:], array[..., ::2]]
    found.append(array.reshape(-1, array.shape[-1]).T)
    for view in list(found):
        axis = int(rng.integers(view.ndim))
        start, stop = sorted(int(n) for n in rng.integers(0, view.shape[axis] + 1, 2))
        found.append(view[(slice(None),) * axis + (slice(start, stop),)])
    return found


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    depth=st.integers(0, 4),
    capacity=st.sampled_from([0, 64, 1 << 16]),
)
def test_every_view_shows_what_the_array_shows(shape: list[int], seed: int, depth: int, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    whole = rng.integers(0, 1 << 16, shape).astype(np.uint16)
    described = array_of_pieces(whole.shape, whole.dtype, cut(whole, rng, depth))
    reader = Reader(capacity, set())
    for number, expected in enumerate(views(whole, np.random.default_rng(seed))):
        view = views(described, np.random.default_rng(seed))[number]
        reader.forget()
        assert (reader.read(view) == expected).all()
        if view.size:
            assert all(n > 0 for n in box_around(described, view).shape)
        if (runs := runs_in_order(view, 1)) is not None:
            assert np.concatenate(runs).tolist() == expected.reshape(-1).tolist()
        if (columns := columns_in_order(view)) is not None:
            assert (np.concatenate(columns, 1) == expected.reshape(len(expected), -1)).all()


def test_only_what_a_view_shows_is_read(tmp_path: Path) -> None:
    """Columns of a matrix that lies in four quarters: the box is those columns, and the memory that of the box."""
    whole = np.arange(64 * 96, dtype=np.uint16).reshape(64, 96)
    quarters = [((r, c), whole[r : r + 32, c : c + 48]) for r in (0, 32) for c in (0, 48)]
    described = array_of_pieces(whole.shape, whole.dtype, quarters)
    assert box_around(described, described.T[40:56]).shape == (64, 16)
    assert box_around(described, described[5]).shape == (1, 96)
    # One of three blocks in each head, as the fused query, key and value are taken apart.
    blocks = described.reshape(8, 2, 4, 96)[:, 1]
    assert (Reader(0, set()).read(blocks) == whole.reshape(8, 2, 4, 96)[:, 1]).all()


def test_rows_and_columns_of_pieces_are_found_in_the_order_of_a_view() -> None:
    whole = np.arange(64 * 96, dtype=np.uint16).reshape(64, 96)
    rows = array_of_pieces(whole.shape, whole.dtype, [((32, 0), whole[32:]), ((0, 0), whole[:32])])
    heads = rows.reshape(8, 2, 4, 96)[:, 1]
    runs = runs_in_order(heads, 4 * 96 * 2)
    assert runs is not None
    assert len(runs) == 8
    assert runs_in_order(heads, 4 * 96 * 2 + 1) is None
    columns = [((0, 60), np.ascontiguousarray(whole[:, 60:])), ((0, 0), np.ascontiguousarray(whole[:, :60]))]
    joined = columns_in_order(array_of_pieces(whole.shape, whole.dtype, columns)[3:])
    assert joined is not None
    assert [part.shape for part in joined] == [(61, 60), (61, 36)]
    assert columns_in_order(rows) is None


def test_checksums_of_all_pieces_are_compared(tmp_path: Path) -> None:
    whole = np.arange(60, dtype=np.float32).reshape(6, 10)
    quarters = [((r, c), whole[r : r + 3, c : c + 5]) for r in (0, 3) for c in (0, 5)]
    pieces = [(start, stored(piece, tmp_path / str(number))) for number, (start, piece) in enumerate(quarters)]
    reader = Reader(1 << 10, set())
    described = array_of_pieces(whole.shape, whole.dtype, pieces)
    assert (reader.read(described) == whole).all()
    reader.verify(described)
    content = bytearray((tmp_path / "2").read_bytes())
    content[9] ^= 4
    (tmp_path / "2").write_bytes(content)
    with pytest.raises(CheckpointError, match="2 is damaged"):
        Reader(1 << 10, set()).verify(described)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    rank=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    depth=st.integers(0, 3),
)
def test_a_sum_with_a_product_shows_what_numpy_computes(
    shape: tuple[int, int], rank: int, seed: int, depth: int
) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = 2 * shape[0], shape[1]
    base = rng.standard_normal((rows, columns)).astype(np.float16)
    left, right = (rng.standard_normal(size).astype(np.float32) for size in ((rows, rank), (rank, columns)))
    wanted = base.astype(np.float32) + left @ right
    pieces = array_of_pieces(base.shape, base.dtype, cut(base, rng, depth))
    whole = array_of_pieces(base.shape, np.dtype(np.float32), [((0, 0), LowRankSum(pieces, "fp16", left, right))])
    for view, expected in zip(
        views(whole, np.random.default_rng(seed)), views(wanted, np.random.default_rng(seed)), strict=True
    ):
        assert np.allclose(Reader(1 << 12, set()).read(view), expected, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    block=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    kind=st.sampled_from([E4M3, FP4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_scaled_numbers_show_what_each_byte_and_its_scale_mean(
    shape: tuple[int, int, int], block: tuple[int, int], kind: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    lead, rows, columns = shape[0], 2 * shape[1], 2 * shape[2]
    rows_of_block, columns_of_block = block[0], 2 * block[1]
    codes = rng.integers(0, 0x7F, (lead, rows, columns if kind == E4M3 else columns // 2)).astype(np.uint8)
    grid = -(-rows // rows_of_block), -(-columns // columns_of_block)
    scales = np.exp2(rng.integers(-3, 4, (lead, *grid))).astype(np.float32)
    wanted = np.empty((lead, rows, columns), np.float32)
    for place in np.ndindex(*wanted.shape):
        e, r, c = place
        if kind == E4M3:
            number = torch.tensor(codes[place]).view(torch.float8_e4m3fn).float().item()
        else:
            code = int(codes[e, r, c // 2]) >> 4 * (c % 2) & 15
            number = FP4_VALUES[code]
        wanted[place] = number * scales[e, r // rows_of_block, c // columns_of_block]
    described = Scaled(codes, kind, scales, "fp32", (rows_of_block, columns_of_block), wanted.shape)
    storage = STORAGE[described.result_type]
    whole = array_of_pieces(wanted.shape, storage, [((0, 0, 0), described)])
    for view, expected in zip(
        views(whole, np.random.default_rng(seed)), views(wanted, np.random.default_rng(seed)), strict=True
    ):
        assert np.array_equal(widen(Reader(1 << 12, set()).read(view), described.result_type), expected)
    first, second = slice(rows // 3, None), slice(columns // 3, None)  # a cut of a cut
    cut_twice = described[:, first, second][:, 1:, 1:]
    if all(cut_twice.shape):
        values = widen(Reader(0, set()).read(cut_twice), described.result_type)
        assert np.array_equal(values, wanted[:, first, second][:, 1:, 1:])


def test_a_layout_that_copies_reads_what_it_copies(tmp_path: Path) -> None:
    """Groups that share a key become heads by copies; of an array in pieces no bytes are there to be copied yet."""
    dims = ModelDims(4, 2, 16, 1, 8, 10)
    rows = np.arange((4 + 2 * 2) * 2 * 8, dtype=np.float32).reshape(-1, 8)
    halves = [stored(rows[start : start + 8], tmp_path / str(start)) for start in (0, 8)]
    chunks = [Chunk((0, 0), (8, 8), lambda: halves[0]), Chunk((8, 0), (8, 8), lambda: halves[1])]
    tensor = ChunkedTensor("qkv", rows.shape, "fp32", tuple(chunks))
    rule = Rule("target", qkv_by_group_to_block(2))
    assembly = assemble(Assignment("target", TensorSpec((8, (3, 4, 2))), ("qkv",), rule), (tensor,), dims)
    made = assembly.loaded(Reader(1 << 16, set())).values("fp32", np.empty(1 << 16, np.uint8), Transposer())
    assert np.array_equal(made, rule.layout(rows, dims))
