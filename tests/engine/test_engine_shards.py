"""Where weights come from: files that are read ahead, or nowhere, to measure a model without shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from backends.fastertransformer.engine.errors import WeightsError
from backends.fastertransformer.engine.model import staging
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.precision import choose_precision
from backends.fastertransformer.engine.model.shards import Piece, made_up
from backends.fastertransformer.engine.model.staging import StagedFiles
from backends.fastertransformer.engine.model.weights import load_weights

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def piece(file: str, shape: tuple[int, ...]) -> Piece:
    return Piece(file, shape, torch.float32, file)


def test_made_up_numbers_are_random_and_the_same_for_a_file_every_time() -> None:
    shards = made_up(torch.float32, CPU)
    matrix, other = (shards(piece(f"model.layers.0.mlp.{name}.weight.0.bin", (64, 256))) for name in ("in", "out"))
    assert matrix.std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(matrix, other)
    assert torch.equal(matrix, shards(piece("model.layers.0.mlp.in.weight.0.bin", (64, 256))))
    norm = shards(piece("model.layers.0.input_layernorm.weight.bin", (64,)))
    assert norm.mean().item() == pytest.approx(1.0, abs=0.02)


def test_a_made_up_network_has_every_tensor_and_needs_no_shard(tmp_path: Path) -> None:
    (tmp_path / "config.ini").write_text(
        "[gpt]\nhead_num = 4\nsize_per_head = 16\ninter_size = 256\nnum_layer = 3\nmax_pos_seq_len = 32\n"
        "vocab_size = 100\nstart_id = 0\nend_id = 0\n"
    )
    config, precision = read_config(tmp_path), choose_precision("fp32", CPU)
    weights = load_weights(tmp_path, config, 1, precision, CPU, are_made_up=True)
    assert weights.decoder is not None
    assert len(weights.decoder.layers) == 3
    assert weights.token_embedding.shape == (100, 64)
    assert weights.token_embedding.abs().sum().isfinite()


@pytest.mark.parametrize("ahead_bytes", [0, 1 << 30])
def test_staged_files_are_what_the_files_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_bytes: int
) -> None:
    monkeypatch.setattr(staging, "_PART_BYTES", 3000)
    monkeypatch.setattr(staging, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(staging, "AHEAD_BYTES", ahead_bytes)
    shapes = [(7, 300), (1,), (250, 2), (0, 4), (3, 5, 11)]
    contents = [np.random.default_rng(size).standard_normal(shape, np.float32) for size, shape in enumerate(shapes)]
    for index, content in enumerate(contents):
        content.tofile(tmp_path / f"{index}.bin")
    order = [piece(f"{index}.bin", shape) for index, shape in enumerate(shapes)]
    with StagedFiles(tmp_path, DEVICE) as files:
        shards = files.in_order(order)
        found = [shards(each).cpu().numpy() for each in order]
    for content, read in zip(contents, found, strict=True):
        np.testing.assert_array_equal(read, content)


def test_a_file_that_is_cut_short_while_others_are_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [piece("first.bin", (100,)), piece("second.bin", (100,))]
    np.zeros(100, np.float32).tofile(tmp_path / "first.bin")
    np.zeros(99, np.float32).tofile(tmp_path / "second.bin")
    monkeypatch.setattr(staging, "AHEAD_BYTES", 0)
    with StagedFiles(tmp_path, DEVICE) as files:
        shards = files.in_order(order)
        shards(order[0])
        with pytest.raises(WeightsError, match=r"second.bin: 396 bytes, expected 400"):
            shards(order[1])


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.zeros(4000, np.float32).tofile(tmp_path / "whole.bin")
    np.zeros(99, np.float32).tofile(tmp_path / "cut.bin")
    monkeypatch.setattr(staging, "check_file", lambda *_: None)  # it was whole then
    monkeypatch.setattr(staging, "_PART_BYTES", 200)  # many of its parts are missing, more than there are buffers
    order = [piece("cut.bin", (4000,)), piece("whole.bin", (4000,))]
    with StagedFiles(tmp_path, DEVICE) as files:
        shards = files.in_order(order)
        with pytest.raises(WeightsError, match=r"cut.bin: has become shorter while it was read"):
            shards(order[0])
        assert not shards(order[1]).any()
