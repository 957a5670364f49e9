"""Properties of every family's layout, at random sizes: cutting and joining gives the same tensors again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.shards.inverse_layouts import qkv_block_to_by_head

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from export_scripts.weights.layouts import qkv_by_head_to_block
from export_scripts.weights.schema import ModelDims
from export_scripts.weights.t5_layouts import fused_block, fused_part, half, output, projection
from ft_format.families import gpt, gptj, gptneox, t5
from ft_format.families.family import ConfigValues, Family, render_config

FEW = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))

# Where FasterTransformer cuts, by the end of a name: axis -1 or 0 of a tensor whose other axes are these.
# Documented in its guides and loaders (FasterTransformer, *Weight.cc): what is not here is whole on every rank.
LAST_AXIS_BEHIND_THREE = ("query_key_value.weight", "query_key_value.bias", "qkv.weight", "qkv.bias")
LAST_AXIS = (".q.weight", ".k.weight", ".v.weight", ".wi.weight", ".wi2.weight", "dense_h_to_4h.weight", ".ia3.weight")
FIRST_AXIS = (
    *("attention.dense.weight", "dense_4h_to_h.weight", ".o.weight", ".wo.weight", "relative_attention_bias.weight"),
    *("dense_h_to_4h.bias", ".q.bias", ".k.bias", ".v.bias", ".wi.bias", ".wi2.bias"),
)

model_sizes = st.fixed_dictionaries(
    {
        "head_num": st.sampled_from([2, 3, 6]),
        "size_per_head": st.integers(2, 5),
        "inter_size": st.sampled_from([12, 24, 36]),
        "vocab_size": st.integers(1, 9),
    }
)
layers = st.integers(1, 2)


@st.composite
def gpt_models(draw: st.DrawFn) -> tuple[Family, ModelDims]:
    family = draw(st.sampled_from([gpt.FAMILY, gptj.FAMILY, gptneox.FAMILY]))
    flags = {}
    if family is gpt.FAMILY:
        names = ("has_positional_encoding", "has_pre_decoder_layernorm", "has_post_decoder_layernorm")
        flags = {name: draw(st.booleans()) for name in (*names, "has_untied_head")}
    if family is gptneox.FAMILY:
        flags = {"use_gptj_residual": draw(st.booleans())}
    if family is not gpt.FAMILY:
        flags |= {"rotary_embedding": 2}
    positions = draw(st.integers(1, 7))
    return family, ModelDims(**draw(model_sizes), **flags, num_layer=draw(layers), max_pos_seq_len=positions)


@st.composite
def t5_models(draw: st.DrawFn) -> tuple[Family, t5.T5Dims]:
    dims = t5.T5Dims(
        **draw(model_sizes),
        d_model=draw(st.integers(1, 11)),
        encoder_layer_num=draw(layers),
        decoder_layer_num=draw(layers),
        position_num=draw(st.integers(1, 6)),
        has_relative_positions=draw(st.booleans()),
        has_bias=draw(st.booleans()),
        activation=draw(st.sampled_from(t5.ACTIVATIONS)),
        ia3_num_tasks=draw(st.integers(0, 2)),
        adapter_inter_size=draw(st.sampled_from([0, 6])),
    )
    return t5.FAMILY, dims


def write_model(root: Path, family: Family, dims: Any) -> dict[str, np.ndarray]:
    """Fill a directory of one rank with numbers that are all different; returns each file's content, flat."""
    root.mkdir()
    written, start = {}, 1
    for name, target in family.schema(dims).items():
        size = int(np.prod(target.full_shape(dims)))
        written[name] = np.arange(start, start + size, dtype="<f4")
        start += size
        suffix = ".0.bin" if target.split_axis is not None else ".bin"
        written[name].tofile(root / f"{name}{suffix}")
    (root / "config.ini").write_text(render_config(family, ConfigValues(dims, 1, "fp32", 0, 1)))
    return written


def joined(root: Path, name: str, dims: Any, ranks: int) -> np.ndarray:
    """Join the ranks' files by FasterTransformer's documents; returns the content, flat."""
    files = sorted(root.glob(f"{name}.*.bin"), key=lambda file: int(file.name.split(".")[-2]))
    parts = [np.fromfile(file, "<f4") for file in files]
    if name.endswith(FIRST_AXIS):
        return np.concatenate(parts)
    if name.endswith((*LAST_AXIS_BEHIND_THREE, *LAST_AXIS)):
        rows = dims.ia3_num_tasks if "ia3" in name else (1 if name.endswith("bias") else width(dims))
        rows *= 3 if name.endswith(LAST_AXIS_BEHIND_THREE) else 1
        return np.concatenate([part.reshape(rows, -1) for part in parts], axis=1).ravel()
    assert not parts, f"{name} is whole on every rank"
    share = ranks if name.endswith("attention.bias.sum") else 1
    return np.fromfile(root / f"{name}.bin", "<f4") * share


def width(dims: Any) -> int:
    return dims.hidden_units if isinstance(dims, ModelDims) else dims.d_model


def check_around(family: Family, dims: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        written = write_model(root / "1", family, dims)
        for ranks in (n for n in (2, 3) if dims.head_num % n == 0 and dims.inter_size % n == 0):
            cut, back = root / str(ranks), root / f"{ranks}_back"
            convert(ConvertArguments(root / "1", cut, ranks, "fp32"))
            for name, whole in written.items():
                np.testing.assert_allclose(joined(cut, name, dims, ranks), whole, rtol=1e-6, err_msg=name)
            convert(ConvertArguments(cut, back, 1, "fp32"))
            for file in (root / "1").glob("*.bin"):
                exact = file.read_bytes() == (back / file.name).read_bytes()
                assert exact or "bias.sum" in file.name and ranks % 3 == 0, file.name  # a third is rounded


@FEW
@given(gpt_models())
def test_gpts_cut_and_joined_are_the_same(model: tuple[Family, ModelDims]) -> None:
    check_around(*model)


@FEW
@given(t5_models())
def test_t5s_cut_and_joined_are_the_same(model: tuple[Family, t5.T5Dims]) -> None:
    check_around(*model)


ranks_and_heads = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))


@given(ranks_and_heads, st.sampled_from(["weight", "bias"]))
def test_fused_qkv_there_and_back(sizes: tuple[int, int, int, int], kind: str) -> None:
    heads, each, size, width = sizes
    dims = ModelDims(heads * each, size, 1, 1, 1, 1)
    shape = (heads * each * 3 * size, *((width,) if kind == "weight" else ()))
    values = np.arange(np.prod(shape)).reshape(shape)
    assert np.array_equal(qkv_block_to_by_head(qkv_by_head_to_block(values, dims), dims), values)


def t5_dims(heads: int, size: int) -> t5.T5Dims:
    return t5.T5Dims(heads, size, 1, 1, 1, 1, 1, 1)


CASES: dict[str, tuple[Callable[..., Any], int, int, int]] = {
    # layout, rows a head, axis of the source that training cuts, axis of the result along which ranks follow
    "projection": (projection, 1, 0, 1),
    "output": (output, 1, 1, 0),
    "block": (fused_block(), 3, 0, 2),
    "block, legacy": (fused_block(is_legacy=True), 3, 0, 2),
    "second of two": (fused_part(1, 2), 2, 0, 1),
    "third of three, legacy": (fused_part(2, 3, is_legacy=True), 3, 0, 1),
}


@pytest.mark.parametrize("case", CASES)
@FEW
@given(ranks_and_heads)
def test_layouts_hold_for_one_training_ranks_part(case: str, sizes: tuple[int, int, int, int]) -> None:
    """Laying out each rank's part and joining is laying out the whole, whose heads are numbered through the ranks."""
    layout, rows, axis, result_axis = CASES[case]
    ranks, each, size, width = sizes
    long = rows * each * size
    parts = [np.arange(long * width).reshape(long, width) + rank * 1000 for rank in range(ranks)]
    if axis == 1:
        parts = [part.T for part in parts]
    apart = np.concatenate([layout(part, t5_dims(ranks * each, size)) for part in parts], result_axis)
    assert apart.shape[result_axis] == ranks * each
    if "legacy" not in case:  # there, ranks' parts are not simply one after another in the whole
        whole = layout(np.concatenate(parts, axis), t5_dims(ranks * each, size))
        assert np.array_equal(apart, whole)
    for head in range(ranks * each):
        rank = head // each
        taken = np.take(apart, head, result_axis)
        assert (taken // 1000 == rank).all()


@given(st.integers(1, 6), st.integers(1, 5))
def test_halves_of_a_fused_gate(rows: int, width: int) -> None:
    values = np.arange(2 * rows * width).reshape(2 * rows, width)
    gate, up = (half(index)(values, t5_dims(1, 1)).T for index in (0, 1))
    assert np.array_equal(np.concatenate([gate, up]), values)
