"""NeMo's and Megatron-LM's Llama and its relatives: what their configurations say, and what of it is refused."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.llama_configs import megatron_lm, nemo1, nemo2, padded_vocabulary
from support.checkpoints.llama_files import (
    chunked,
    sentencepiece_model,
    write_archive,
    write_megatron_lm,
    write_megatron_lm_tree,
    write_nemo2_tree,
    write_torch_dist,
)
from support.checkpoints.llama_state import core_state
from support.engines.network_runs import open_network, prefill_logits
from support.tiny_models.llama_models import VOCAB, Saved, input_ids, saved

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.files import distributed_metadata, pickled
from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.checkpoints.formats import open_source
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from export_scripts.weights.matching import match
from handover.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def assert_transformers_logits(path: Path, output: Path, source: Saved) -> None:
    convert(ConvertArguments(path, output, 1, "fp32", processes=1, format="huggingface"))
    made = prefill_logits(open_network(output, 1, "Llama"), torch.from_numpy(input_ids())).numpy()[..., :VOCAB]
    assert np.abs(made - source.logits).max() < 1e-5 * max(1.0, float(np.abs(source.logits).max()))


def state_of(source: Saved, ranks: int, stores_one_more: bool = False) -> dict[str, Any]:
    return core_state(source.tensors, source.config, padded_vocabulary(source.config, ranks), stores_one_more)


def test_the_description_of_many_chunks_may_take_more_steps_than_that_of_a_files_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture of a trillion parameters has 70,000 chunks, of 130 steps each."""
    source = saved("llama")
    write_torch_dist(write_nemo2_tree(tmp_path / "m", nemo2(source.config, "llama")), chunked(state_of(source, 2), 2))
    monkeypatch.setattr(pickled, "_MOST_STEPS", 1000)
    open_source(open_archive(tmp_path / "m"))
    monkeypatch.setattr(distributed_metadata, "_MOST_STEPS", 1000)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it takes more than 1,000 steps"):
        open_source(open_archive(tmp_path / "m"))


@pytest.mark.parametrize("form", ["archive", "torch_dist"])
def test_a_mixtral_is_read_whole(form: str, tmp_path: Path) -> None:
    source, path = saved("mixtral"), tmp_path / "model"
    state = state_of(source, 2)
    if form == "archive":
        path = write_archive(tmp_path / "model.nemo", nemo1(source.config, (2, 1)), state, (2, 1), "model.module.")
    else:
        write_torch_dist(write_nemo2_tree(path, nemo2(source.config, "mixtral")), chunked(state, 2))
    found = open_source(open_archive(path))
    assignments = match(found.schema(), found.source_map, found.dims, found.tensors, found.other_keys)
    assert sum("experts" in each.name for each in assignments) == 2 * 4 * 3
    with pytest.raises(CheckpointError, match=r"mixture = Mixture.expert_num=4, (.|\n)*format=huggingface"):
        inspect_source(path, 1, "fp32")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rotary_interleaved": True}, "rotary_interleaved: True  ("),
        ({"window_size": [4, 4]}, "window_size: [4, 4]  ("),
        ({"activation": "quick_gelu"}, "activation: quick_gelu  ("),
        ({"normalization": "scalenorm"}, "normalization: scalenorm  ("),
        ({"megatron_legacy": True}, "megatron_legacy: True  ("),
        ({"num_query_groups": 3}, "num_query_groups 3"),
        ({"mcore_customization_config": {"softmax_scale": 0.1}}, "attention.multiplier = 0.1  ("),
        ({"scale_positional_embedding": True, "seq_len_interpolation_factor": 2}, "seq_len_interpolation_factor: 2  ("),
    ],
)
def test_what_cannot_be_had_is_refused_by_key_and_value(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    source = saved("llama")
    path = write_archive(tmp_path / "model.nemo", nemo1(source.config, **changes), state_of(source, 1))
    with pytest.raises(CheckpointError) as refused:
        inspect_source(path, 1, "fp32")
    assert named in str(refused.value)


def test_norms_stored_less_one_by_the_name_that_megatron_lm_has_for_them_since_0_16(tmp_path: Path) -> None:
    source = saved("nemotron")
    arguments = megatron_lm(source.config, layernorm_zero_centered_gamma=True, layernorm_epsilon=1e-5)
    del arguments["apply_layernorm_1p"], arguments["norm_epsilon"]
    write_megatron_lm(tmp_path / "mlm", arguments, state_of(source, 1))
    (tmp_path / "mlm/tokenizer.model").write_bytes(sentencepiece_model())
    assert_transformers_logits(tmp_path / "mlm", tmp_path / "out", source)


def test_falcons_parallel_attention_is_refused_and_mistrals_key_without_effect_is_not(tmp_path: Path) -> None:
    source = saved("nemotron")
    custom = {"parallel_attention": True}
    path = write_archive(
        tmp_path / "falcon.nemo", nemo1(source.config, mcore_customization_config=custom), state_of(source, 1)
    )
    with pytest.raises(CheckpointError, match="mcore_customization_config.parallel_attention: True"):
        inspect_source(path, 1, "fp32")
    source = saved("mistral")
    config = nemo1(source.config)
    assert config["mcore_customization_config"]["parallel_attention"]
    path = write_archive(tmp_path / "m.nemo", config, state_of(source, 1), (1, 1), "model.module.")
    assert_transformers_logits(path, tmp_path / "out", source)


def test_the_number_of_a_window_is_copied_as_nemos_exporters_do_and_said(tmp_path: Path) -> None:
    source = saved("mistral")
    path = write_archive(tmp_path / "model.nemo", nemo1(source.config), state_of(source, 1), prefix="model.module.")
    found = open_source(open_archive(path))
    assert found.dims.layers[0].window == source.config.sliding_window == 5  # type: ignore[attr-defined]
    assert any("window_size [5, 0] becomes a window of 5 tokens" in each for each in found.remarks)
    path = write_archive(tmp_path / "llama.nemo", nemo1(saved("llama").config), state_of(saved("llama"), 1))
    assert not any("window" in each for each in open_source(open_archive(path)).remarks)


@pytest.mark.parametrize("form", ["archive", "NeMo 2", "Megatron-LM"])
def test_a_router_that_leaves_tokens_out_is_said_of_nemo_and_refused_of_megatron(form: str, tmp_path: Path) -> None:
    source, path = saved("mixtral"), tmp_path / "model"
    state, capacity = state_of(source, 1), {"moe_expert_capacity_factor": 1.25}
    if form == "archive":
        path = write_archive(tmp_path / "m.nemo", nemo1(source.config, **capacity), state, prefix="model.module.")
    elif form == "NeMo 2":
        write_torch_dist(write_nemo2_tree(path, nemo2(source.config, "mixtral", **capacity)), chunked(state, 1))
    else:
        write_megatron_lm(path, megatron_lm(source.config, **capacity), state)
        with pytest.raises(CheckpointError, match="moe_expert_capacity_factor: 1.25  .*leaves out tokens"):
            open_source(open_archive(path))
        return
    said = "moe_expert_capacity_factor: 1.25  is not carried over: training left out tokens"
    assert [each for each in open_source(open_archive(path)).remarks if each.startswith(said)]


@pytest.mark.parametrize("has_common_file", [True, False])
def test_what_is_common_is_a_file_or_an_object_among_the_tensors(has_common_file: bool, tmp_path: Path) -> None:
    source = saved("llama")
    common = {"args": Namespace(**megatron_lm(source.config)), "checkpoint_version": 3.0}
    tree = write_megatron_lm_tree(tmp_path / "run")
    write_torch_dist(tree, chunked(state_of(source, 2), 2), "", common, has_common_file)
    assert_transformers_logits(tmp_path / "run", tmp_path / "out", source)


def test_what_megatron_lm_itself_did_not_always_honour_is_said(tmp_path: Path) -> None:
    source = saved("llama32")
    path = write_megatron_lm(tmp_path / "mlm", megatron_lm(source.config), state_of(source, 1))
    (path / "tokenizer.model").write_bytes(sentencepiece_model())
    (said,) = open_source(open_archive(path)).remarks
    assert said == "rope_scaling_factor: 32.0  is honoured; Megatron-LM before 0.19 trained with 8"


def test_a_distributed_checkpoint_does_not_depend_on_which_rank_had_an_expert(tmp_path: Path) -> None:
    source = saved("mixtral")
    arguments = megatron_lm(source.config, expert_model_parallel_size=2)
    write_torch_dist(
        write_megatron_lm_tree(tmp_path / "d"),
        chunked(state_of(source, 2), 2),
        "",
        {"args": Namespace(**arguments), "checkpoint_version": 3.0},
    )
    assert open_source(open_archive(tmp_path / "d")).dims.expert_num == 4  # type: ignore[attr-defined]
