"""Rearrangements on tensors small enough to write down, and their inverses."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from support.shards.inverse_layouts import qkv_block_to_by_head

from export_scripts.conversion.move.transposition import Transposer
from export_scripts.weights.layouts import qkv_by_head_to_block, transposed, unchanged
from export_scripts.weights.schema import ModelDims, split_layer, with_layer
from ft_format.families import gpt
from ft_format.layout import TensorSpec

TWO_BY_TWO = ModelDims(2, 2, 4, num_layer=1, max_pos_seq_len=1, vocab_size=1)


def test_fused_qkv_of_two_heads_of_two() -> None:
    """Rows of the source are named by what they are: q/k/v, head, element; the column is the input feature."""
    rows = ["q00", "q01", "k00", "k01", "v00", "v01", "q10", "q11", "k10", "k11", "v10", "v11"]
    weight = np.array([[f"{row}.{feature}" for feature in range(4)] for row in rows])
    blocks = qkv_by_head_to_block(weight, TWO_BY_TWO)
    assert blocks.shape == (4, 3, 2, 2)
    assert blocks.reshape(4, 12)[1].tolist() == [
        *("q00.1", "q01.1", "q10.1", "q11.1"),
        *("k00.1", "k01.1", "k10.1", "k11.1"),
        *("v00.1", "v01.1", "v10.1", "v11.1"),
    ]
    bias = qkv_by_head_to_block(np.array(rows), TWO_BY_TWO)
    assert bias.reshape(3, 4).tolist() == [
        ["q00", "q01", "q10", "q11"],
        ["k00", "k01", "k10", "k11"],
        ["v00", "v01", "v10", "v11"],
    ]
    second_rank = np.split(blocks, 2, axis=2)[1]
    assert second_rank.reshape(4, 3, 2)[3].tolist() == [["q10.3", "q11.3"], ["k10.3", "k11.3"], ["v10.3", "v11.3"]]


@pytest.mark.parametrize(("heads", "size"), [(1, 1), (2, 3), (4, 2), (3, 5)])
def test_qkv_inverse(heads: int, size: int) -> None:
    dims = ModelDims(heads, size, 4, num_layer=1, max_pos_seq_len=1, vocab_size=1)
    rng = np.random.default_rng(heads)
    for shape in ((3 * heads * size, heads * size), (3 * heads * size,)):
        values = rng.random(shape)
        assert (qkv_block_to_by_head(qkv_by_head_to_block(values, dims), dims) == values).all()


def test_transposed_and_unchanged() -> None:
    weight = np.array([[1, 2], [3, 4], [5, 6]])
    assert transposed(weight, TWO_BY_TWO).tolist() == [[1, 3, 5], [2, 4, 6]]
    assert (transposed(transposed(weight, TWO_BY_TWO), TWO_BY_TWO) == weight).all()
    assert unchanged(weight, TWO_BY_TWO) is weight


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 33), (31, 100), (1100, 70), (3, 2, 40, 5), (24, 3, 2, 48)])
def test_copying_any_view_in_tiles_is_a_plain_copy(shape: tuple[int, ...], dtype: type) -> None:
    values = np.random.default_rng(0).integers(0, 2**16, shape).astype(dtype)
    turned = [values.transpose(axes) for axes in permutations(range(values.ndim))]
    for view in (*turned, values[::2], values.T[:, ::3], np.broadcast_to(values[:1], shape).swapaxes(0, 1)):
        copy = np.zeros((*view.shape[:-1], view.shape[-1] + 3), dtype)[..., 3:]
        Transposer().copy(copy, view)
        assert (copy == view).all()
        Transposer().copy(copy, view, lambda tile: (tile + 1).astype(dtype))
        assert (copy == view + 1).all() or dtype == np.uint16


def test_shapes_on_disk() -> None:
    dims = ModelDims(4, 16, 256, num_layer=4, max_pos_seq_len=32, vocab_size=1024)
    qkv = TensorSpec(("hidden_units", 3, ("head_num", "size_per_head")), split_axis=2)
    assert qkv.full_shape(dims) == (64, 3, 4, 16)
    assert qkv.shard_shape(dims, 2) == (64, 3, 32)
    assert TensorSpec(("inter_size", "hidden_units"), 0).shard_shape(dims, 4) == (64, 64)
    assert TensorSpec(("vocab_size", "hidden_units")).shard_shape(dims, 4) == (1024, 64)


def test_every_layer_is_in_the_schema() -> None:
    dims = ModelDims(4, 16, 256, num_layer=3, max_pos_seq_len=32, vocab_size=1024)
    assert len(gpt.schema(dims)) == 4 + 3 * 12
    assert "model.lm_head.weight" not in gpt.schema(dims)


def test_layer_numbers_in_keys() -> None:
    assert split_layer("a.layers.12.b.weight") == ("a.layers.{layer}.b.weight", 12)
    assert split_layer("a.embedding.weight") == ("a.embedding.weight", None)
    assert with_layer("a.layers.1.b", 25) == "a.layers.25.b"
