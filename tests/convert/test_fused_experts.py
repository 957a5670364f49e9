"""Directories whose experts are one array, as transformers 5 holds them and newer files of GLM have them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.tiny_models.llama_models import build, logits, save, saved, tensors
from transformers import AutoModelForCausalLM

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.checkpoints.formats import open_source
from export_scripts.conversion.move.placement import assemble
from export_scripts.conversion.write.shards import ShardSettings, Workspace, blocks
from export_scripts.convert import convert
from export_scripts.weights.matching import match
from models.described import find_model_tensors, read_directory
from models.errors import ModelError


def write_fused(name: str, folder: Path, suffix: str) -> None:
    """A model's own state, experts in one array, and its configuration."""
    model = build(name)
    folder.mkdir()
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    ends = ("experts.gate_up_proj", "experts.down_proj")
    save_file({key + suffix * key.endswith(ends): value for key, value in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))


@pytest.mark.parametrize(("name", "suffix"), [("glm4_moe", ".weight"), ("qwen3_moe", "")])
def test_each_expert_of_the_array_is_the_one_that_transformers_saves(name: str, suffix: str, tmp_path: Path) -> None:
    write_fused(name, tmp_path / "fused", suffix)
    source, wanted = open_source(open_archive(tmp_path / "fused"), for_shards=False), saved(name).tensors
    assignments = match(source.schema(), source.source_map, source.dims, source.tensors, source.other_keys)
    assert {each.name for each in assignments} == wanted.keys()
    settings, workspace = ShardSettings(1, "fp32", source.dims), Workspace(set())
    for each in assignments:
        box = assemble(each, [source.tensors[key] for key in each.keys], source.dims)
        rows = [np.array(values) for _, values in blocks(box, box.shape[0], each.name, settings, workspace)]
        assert np.array_equal(np.concatenate(rows).reshape(wanted[each.name].shape), wanted[each.name].numpy())


def test_the_directory_that_is_written_computes_the_same(tmp_path: Path) -> None:
    write_fused("qwen3_moe", tmp_path / "fused", "")
    convert(ConvertArguments(tmp_path / "fused", tmp_path / "hf", weight_data_type="fp32", format="huggingface"))
    assert tensors(tmp_path / "hf").keys() == tensors(tmp_path / "fused").keys()
    made, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values())
    assert np.abs(logits(made.eval()) - saved("qwen3_moe").logits).max() < 1e-5


@pytest.mark.parametrize(("name", "key"), [("exaone_moe", "mtp.fc.weight"), ("ernie4_5_moe", "model.mtp_norm.weight")])
def test_predictors_that_transformers_passes_over_are_written_and_said(name: str, key: str, tmp_path: Path) -> None:
    save(name, tmp_path / "hub")
    found, about = tensors(tmp_path / "hub"), tmp_path / "hub/config.json"
    save_file({**found, key: torch.ones(4)}, tmp_path / "hub/model.safetensors")
    about.write_text(json.dumps({**json.loads(about.read_text()), "num_nextn_predict_layers": 1}))
    source = open_source(open_archive(tmp_path / "hub"), for_shards=False)
    assert [each for each in source.remarks if "1 tensors are written as they are" in each and "predictors" in each]
    convert(ConvertArguments(tmp_path / "hub", tmp_path / "hf", weight_data_type="bf16", format="huggingface"))
    made = tensors(tmp_path / "hf")
    assert made.keys() == {*found, key} and torch.equal(made[key], torch.ones(4, dtype=torch.bfloat16))
    assert json.loads((tmp_path / "hf/config.json").read_text())["num_nextn_predict_layers"] == 1
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(loading.values())
    decoder = read_directory(tmp_path / "hf", ModelError).decoder
    assert find_model_tensors(tmp_path / "hf", decoder, ModelError).keys() == found.keys()


def test_predictors_that_are_counted_and_not_there_are_counted_no_more(tmp_path: Path) -> None:
    save("exaone_moe", tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "num_nextn_predict_layers": 1}))
    source = open_source(open_archive(tmp_path), for_shards=False)
    assert "num_nextn_predict_layers: 1  becomes 0: the files have no predictors" in source.remarks
    assert source.own is not None and source.own.config["num_nextn_predict_layers"] == 0
