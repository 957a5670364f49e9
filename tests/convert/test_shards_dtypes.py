"""Casts against torch's, over every bit pattern of the small types; values that do not fit are refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints.nemo_archive import gpt_state, write_gpt

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from export_scripts.tensors.dtypes import Census, is_finite, recast
from handover.errors import CheckpointError

TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def every_finite(data_type: str) -> torch.Tensor:
    """Every finite value of a 16-bit type, or floats of every exponent with random mantissas."""
    if data_type != "fp32":
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(TORCH[data_type])
    else:
        bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
        ties = np.arange(0, 2**32, 2**15, dtype=np.uint64).astype(np.uint32)  # halfway between bf16's numbers
        values = torch.from_numpy(np.concatenate([bits, ties]).view(np.float32).copy())
    return values[values.isfinite()]


@pytest.mark.parametrize("source", TORCH)
@pytest.mark.parametrize("target", TORCH)
def test_casts_round_as_torch_rounds(source: str, target: str) -> None:
    values = every_finite(source)
    expected = values.to(TORCH[target])
    values, expected = values[expected.isfinite()], expected[expected.isfinite()]
    stored = values.view(torch.int16).numpy().view(np.uint16) if source == "bf16" else values.numpy()
    result = recast(stored, source, target)
    assert result.tobytes() == expected.view(torch.uint8).numpy().tobytes()


BAD = [float("nan"), float("inf"), float("-inf"), *np.array([0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)]


@pytest.mark.parametrize("target", TORCH)
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_values_that_are_no_numbers_are_seen(bad: float, target: str) -> None:
    values = np.array([1, bad, 2], np.float32)
    assert not is_finite(recast(values, "fp32", target), target)
    census = Census()
    census.add(values, (10,))
    expected = "model.wte holds 1 values that are NaN or infinite, the first at [11]"
    assert census.error("model.wte", target).problem == expected


@pytest.mark.parametrize("target", TORCH)
def test_every_finite_number_is_known_as_one(target: str) -> None:
    values = every_finite(target)
    stored = values.view(torch.int16).numpy().view(np.uint16) if target == "bf16" else values.numpy()
    assert is_finite(stored, target)


@pytest.mark.parametrize(("value", "target"), [(65520, "fp16"), (-7e4, "fp16"), (3.4e38, "bf16")])
def test_overflow_names_tensor_and_magnitude(value: float, target: str) -> None:
    values, census = np.array([1, value], np.float32), Census()
    assert not is_finite(recast(values, "fp32", target), target)
    census.add(values, (0,))
    problem = census.error("model.wte", target).problem
    assert f"model.wte overflows {target}: its largest magnitude is" in problem and "at [1]" in problem


def test_largest_numbers_still_fit() -> None:
    assert recast(np.array([65519.9], np.float32), "fp32", "fp16").tolist() == [65504.0]


def test_conversion_refuses_what_overflows_and_leaves_no_manifest(tmp_path: Path) -> None:
    state = gpt_state()
    state["model.language_model.encoder.layers.1.mlp.dense_4h_to_h.weight"][2, 3] = 1e5
    archive = write_gpt(tmp_path / "gpt.nemo", state)
    with pytest.raises(CheckpointError, match="model.layers.1.mlp.dense_4h_to_h.weight overflows fp16"):
        convert(ConvertArguments(archive, tmp_path / "out", 2, "fp16"))
    assert not (tmp_path / "out/manifest.json").exists()
    assert convert(ConvertArguments(archive, tmp_path / "out", 2, "bf16")).kind == "ft_checkpoint"
