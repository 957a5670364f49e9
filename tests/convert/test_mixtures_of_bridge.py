"""Mixtures of Megatron-Bridge whose function no class of transformers has, or another class than their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.checkpoints.core_latent import with_predictor
from support.checkpoints.llama_configs import bridge, padded_vocabulary
from support.checkpoints.llama_files import chunked, write_bridge_tree, write_torch_dist
from support.checkpoints.llama_sources import Case, write_source
from support.checkpoints.llama_state import core_state
from support.tiny_models.llama_models import saved, tensors

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.convert import convert
from export_scripts.targets.huggingface.plan import Wish, plan_huggingface
from handover.errors import CheckpointError
from models.blocks.attention import BY_HEAD
from models.decoder import Decoder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run_of(name: str, folder: Path, **changes: Any) -> Path:
    """A run of one of transformers' models, with other fields than its own."""
    write_source(Case(name, "Bridge, layers apart"), folder)
    file = folder / "iter_0000007/run_config.yaml"
    run = yaml.safe_load(file.read_text())
    run["model"] |= changes
    file.write_text(yaml.safe_dump(run))
    return folder


def test_ernies_sigmoid_is_refused_with_what_to_write(tmp_path: Path) -> None:
    """Megatron-Bridge's ``ernie_45_bridge.py`` sets it; transformers' Ernie4_5_MoeTopKRouter has a softmax."""
    run = run_of("ernie4_5_moe", tmp_path / "run", moe_router_score_function="sigmoid")
    with pytest.raises(CheckpointError, match=r"moe_router_score_function: sigmoid  \(beside rotary_interleaved"):
        open_source(find_archive(run), for_shards=False)


def test_ling_2_becomes_the_class_that_computes_the_same(tmp_path: Path) -> None:
    """``bailing_moe2_bridge.py``: GLM's fields, and a flag that a sigmoid passes over."""
    run = run_of("glm4_moe", tmp_path / "run", moe_router_pre_softmax=True, moe_router_load_balancing_type="none")
    plan = plan_huggingface(find_archive(run), Wish("fp32", 10**9))
    assert plan.architecture == "Glm4MoeForCausalLM"
    assert isinstance(plan.source.dims, Decoder)
    assert plan.source.dims.attention.qk_norm == BY_HEAD


@pytest.mark.parametrize("said", [{"mtp_num_layers": 1}, {"mtp_num_layers": 3, "mtp_use_repeated_layer": True}])
def test_glms_predictors_are_those_of_its_files(said: dict[str, Any], tmp_path: Path) -> None:
    source = saved("glm4_moe")
    wanted = with_predictor(source.tensors)
    weights = write_bridge_tree(tmp_path / "run", bridge(source.config) | said)
    state = core_state(wanted, source.config, padded_vocabulary(source.config, 1))
    write_torch_dist(weights, chunked(state, 1, is_stacked=False), "", {"iteration": 7})
    for path, out in ((tmp_path / "run", tmp_path / "hf"), (tmp_path / "hf", tmp_path / "again")):
        convert(ConvertArguments(path, out, weight_data_type="fp32", format="huggingface"))
        made = tensors(out)
        assert made.keys() == wanted.keys()
        assert all(torch.equal(made[key], value) for key, value in wanted.items())
        assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("name", ["exaone_moe", "qwen3_moe"])
def test_predictors_that_no_class_has_are_left_out_and_named(name: str, tmp_path: Path) -> None:
    source = saved(name)
    said = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
    weights = write_bridge_tree(tmp_path / "run", bridge(source.config) | said)
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, 1))
    state["mtp.layers.0.enorm.weight"] = source.tensors["model.norm.weight"]
    write_torch_dist(weights, chunked(state, 1, is_stacked=False), "", {"iteration": 7})
    remarks = open_source(find_archive(tmp_path / "run"), for_shards=False).remarks
    assert [said for said in remarks if said.startswith("1 tensors are left out, such as mtp.layers.0.enorm.weight")]
    convert(ConvertArguments(tmp_path / "run", tmp_path / "hf", weight_data_type="fp32", format="huggingface"))
    assert tensors(tmp_path / "hf").keys() == source.tensors.keys()


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("glm4_moe", {"moe_router_group_topk": 1}, "moe_router_group_topk: 1"),  # a group counts as its best four
        ("glm4_moe", {"moe_shared_expert_intermediate_size": 41}, r"shared_experts.linear_fc1.weight  \[80, 64\]"),
        ("glm4_moe", {"moe_router_topk": 1, "moe_router_group_topk": 1}, "mixture.is_group_of_two"),
        ("minimax_m2", {"moe_router_topk_scaling_factor": 2.0}, "mixture.scale: 2.0"),
        ("minimax_m2", {"moe_router_topk": 1}, "mixture.is_normalised: False"),
        ("qwen3_moe", {"moe_router_score_function": "sigmoid"}, "mixture.scoring: sigmoid"),
        ("qwen3_moe", {"moe_router_topk_scaling_factor": 2.0}, "mixture.scale: 2.0"),
        ("exaone_moe", {"sliding_windows": [5, 0, 7]}, "sliding_windows"),
        ("exaone_moe", {"swiglu_limits": [1.0, 1.0, 1.0]}, "swiglu_limits"),
        ("olmoe", {"moe_router_score_function": "sqrtsoftplus"}, "moe_router_score_function"),
    ],
)
def test_what_no_class_has_is_refused_by_name(name: str, changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    run = run_of(name, tmp_path / "run", **changes)
    with pytest.raises(CheckpointError, match=problem):
        plan_huggingface(find_archive(run), Wish("fp32", 10**9))
