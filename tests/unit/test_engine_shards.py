"""Weights that are made up, to measure a model whose shards nobody has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backends.fastertransformer.engine.config import read_config
from backends.fastertransformer.engine.precision import choose_precision
from backends.fastertransformer.engine.shards import made_up
from backends.fastertransformer.engine.weights import load_weights

CPU = torch.device("cpu")


def test_made_up_numbers_are_random_and_the_same_for_a_file_every_time() -> None:
    shards = made_up(torch.float32, CPU)
    matrix, other = (shards(f"model.layers.0.mlp.{name}.weight.0.bin", (64, 256)) for name in ("in", "out"))
    assert matrix.std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(matrix, other)
    assert torch.equal(matrix, shards("model.layers.0.mlp.in.weight.0.bin", (64, 256)))
    assert shards("model.layers.0.input_layernorm.weight.bin", (64,)).mean().item() == pytest.approx(1.0, abs=0.02)


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
