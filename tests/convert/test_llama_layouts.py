"""The writer of NeMo's layouts is right: NeMo's own computation on its files gives transformers' logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from support.checkpoints.llama_configs import nemo1, nemo2, padded_vocabulary
from support.checkpoints.llama_files import (
    chunked,
    write_archive,
    write_nemo1_tree,
    write_nemo2_tree,
    write_torch_dist,
    write_zarr,
)
from support.checkpoints.llama_reading import read_archive, read_torch_dist, read_zarr
from support.checkpoints.llama_state import core_state, local_norms, two_matrices
from support.checkpoints.megatron_core_record import digest_of, recorded
from support.tiny_models.llama_forward import Rules, Weights, forward, rules_of_nemo1, rules_of_nemo2
from support.tiny_models.llama_models import VOCAB, Saved, input_ids, saved

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ARCHIVES = [
    ("llama", (4, 1)),
    ("llama_linear", (2, 2)),
    ("llama31", (1, 2)),
    ("llama32", (2, 2)),
    ("mistral", (4, 1)),
    ("nemotron", (2, 1)),
    ("qwen2", (2, 2)),
    ("gemma", (2, 1)),
    ("gemma2", (4, 1)),
    ("mixtral", (2, 1)),
    ("starcoder2", (2, 1)),
]


def assert_transformers_logits(ranks: list[Weights], rules: Rules, source: Saved) -> None:
    made = forward(ranks, rules, input_ids())[..., :VOCAB]
    assert source.logits.std() > 0.5, "the model says something"
    assert np.abs(made - source.logits).max() < 1e-5


@pytest.mark.parametrize(("name", "grid"), ARCHIVES)
def test_archives(name: str, grid: tuple[int, int], tmp_path: Path) -> None:
    source = saved(name)
    config = nemo1(source.config, grid)
    is_gemma = source.config.model_type == "gemma"
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, grid[0]), is_gemma)
    prefix = "model.module." if config["megatron_amp_O2"] else "model."
    config, ranks = read_archive(write_archive(tmp_path / "model.nemo", config, state, grid, prefix))
    assert len(ranks) == grid[0]
    assert_transformers_logits(ranks, rules_of_nemo1(config), source)


@pytest.mark.parametrize("activation", ["fast-swiglu", "swiglu"])
@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (4, 2)])
def test_legacy_archives(activation: str, grid: tuple[int, int], tmp_path: Path) -> None:
    source = saved("llama_mha")
    config = nemo1(source.config, grid, mcore_gpt=False, transformer_engine=False, activation=activation)
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, grid[0]))
    state = two_matrices(state) if activation == "swiglu" else state
    path = write_archive(tmp_path / "model.nemo", config, state, grid, "model.language_model.")
    config, ranks = read_archive(path)
    assert any("linear_fc1.weight" in key for key in ranks[0])
    assert_transformers_logits(ranks, rules_of_nemo1(config), source)


def test_archives_of_the_local_specification(tmp_path: Path) -> None:
    source = saved("llama")
    state = local_norms(core_state(source.tensors, source.config, 128))
    config, ranks = read_archive(write_archive(tmp_path / "model.nemo", nemo1(source.config, (2, 1)), state, (2, 1)))
    assert_transformers_logits(ranks, rules_of_nemo1(config), source)


@pytest.mark.parametrize(("name", "ranks"), [("llama", 4), ("mixtral", 2), ("nemotron", 1)])
def test_zarr(name: str, ranks: int, tmp_path: Path) -> None:
    source = saved(name)
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, ranks))
    config = nemo1(source.config, (ranks, 1))
    folder = write_nemo1_tree(tmp_path / "tree", config)
    write_zarr(folder, chunked(state, ranks))
    assert_transformers_logits([read_zarr(folder)], rules_of_nemo1(config), source)


@pytest.mark.parametrize("is_stacked", [True, False])
@pytest.mark.parametrize("has_pairs", [True, False])
@pytest.mark.parametrize(("name", "ranks"), [("llama32", 4), ("gemma", 2), ("gemma2", 1), ("qwen3", 2), ("mixtral", 2)])
def test_torch_dist(name: str, ranks: int, has_pairs: bool, is_stacked: bool, tmp_path: Path) -> None:
    source = saved(name)
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, ranks))
    folder = write_nemo2_tree(tmp_path / "nemo2", nemo2(source.config, name))
    write_torch_dist(folder, chunked(state, ranks, is_stacked, has_pairs))
    rules = rules_of_nemo2(yaml.safe_load((tmp_path / "nemo2/context/model.yaml").read_text()))
    assert_transformers_logits([read_torch_dist(folder)], rules, source)


@pytest.mark.parametrize("case", recorded("arrays"))
def test_torch_dist_has_megatron_cores_own_arrays(case: str, tmp_path: Path) -> None:
    name, ranks = case.split()[0].rstrip(","), int(case.split()[1])
    source = saved(name)
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, ranks))
    write_torch_dist(tmp_path, chunked(state, ranks))
    assert digest_of(read_torch_dist(tmp_path)) == recorded("arrays")[case]
