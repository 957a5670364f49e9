"""The equation of a conversion, tensor by tensor: nothing that is missing or smaller goes unnoticed.

Each source of each family is opened once, and ``check`` runs on it again and again with one tensor left out, or one
dimension of one tensor one smaller. Nothing else may come of it than a refusal that names the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import fairseq_checkpoints as fairseq
from support.checkpoints import gptj_slim_checkpoints as slim
from support.checkpoints import megatron_checkpoints as megatron
from support.checkpoints.equation_sources import huggingface_t5_files, nemo_rotary
from support.checkpoints.megatron_core import core_state
from support.checkpoints.nemo_archive import NEMO, gpt_config, gpt_state, write_gpt, write_nemo
from support.checkpoints.prompt_tables import write_tables
from support.checkpoints.t5_adapters import write_task
from support.shards.gpt2_checkpoint import random_gpt2
from support.tiny_models.huggingface_models import HIDDEN, build, save
from support.tiny_models.t5_models import (
    HEADS,
    VOCABULARY,
    Saving,
    huggingface_t5,
    nemo_states,
    plain_from_huggingface,
    relative_config,
)

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.source import Source
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from export_scripts.weights.matching import match, zeros_made
from export_scripts.weights.schema import LazyTensor, split_layer
from handover.errors import CheckpointError


def nemo_core(root: Path) -> Path:
    return write_gpt(root, core_state(), num_query_groups=4, num_layers=2)


def nemo_t5(root: Path) -> Path:
    model = huggingface_t5(is_multilingual=True, feed_forward_proj="gated-gelu", num_decoder_layers=4)
    states = nemo_states(plain_from_huggingface(model), HEADS, Saving())
    root.mkdir()
    write_nemo(root / "t5.nemo", relative_config(Saving(), "geglu"), states, files=VOCABULARY)
    write_task(root / "task.nemo", "task", "middle")
    return root


def ft_checkpoint(root: Path) -> Path:
    convert(ConvertArguments(write_gpt(root.with_suffix(".source")), root, 2, "fp32"))
    (root / "manifest.json").unlink()
    return root


def hugging_face(family: str, **changes: Any) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        save(family, root, **changes)
        return root

    return make


SOURCES: dict[str, Callable[[Path], Path]] = {
    "NeMo": lambda root: write_gpt(root),
    "NeMo, two ranks": lambda root: write_nemo(
        root,
        gpt_config(tensor_model_parallel_size=2),
        {f"mp_rank_{rank:02d}/model_weights.ckpt": halves(gpt_state(), rank) for rank in range(2)},
    ),
    "NeMo, rotary": nemo_rotary,
    "megatron-core": nemo_core,
    "NeMo T5, absolute positions": lambda root: Path(NEMO / "t5_abs.nemo"),
    "NeMo T5 with IA3 vectors": nemo_t5,
    "Megatron-LM": lambda root: megatron.write(root, random_gpt2(n_layer=4, n_positions=16), 3.0),
    "GPT-J's original": lambda root: slim.write_slim(slim.rounded_model(), root, np.full(HIDDEN, 1 / 16, np.float32)),
    "fairseq": lambda root: fairseq.write(root, build("xglm", activation_function="relu")),
    "FT checkpoint": ft_checkpoint,
    **{family: hugging_face(family) for family in ("gpt2", "opt", "bloom", "xglm", "gptj", "gpt_neox", "gpt_bigcode")},
    "gpt_neox without biases of attention": hugging_face("gpt_neox", attention_bias=False),
    "opt with projections": hugging_face("opt", word_embed_proj_dim=16),
    "T5": lambda root: huggingface_t5_files(root),
    "T5, untied": lambda root: huggingface_t5_files(
        root, is_untied=True, tie_word_embeddings=False, feed_forward_proj="gated-gelu"
    ),
}


def halves(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Cut a legacy NeMo GPT's state for two training ranks."""
    cut = {}
    for key, value in state.items():
        axis = 1 if key.endswith(("attention.dense.weight", "4h_to_h.weight")) else 0
        is_cut = any(name in key for name in ("word_embeddings", "query_key_value", "h_to_4h")) or axis == 1
        is_tensor = isinstance(value, torch.Tensor)
        cut[key] = value.chunk(2, axis)[rank].clone() if is_tensor and is_cut else value
    return cut


@dataclass(frozen=True)
class Shrunk:
    """A tensor that says it is smaller along one axis."""

    tensor: LazyTensor
    at: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size - (index == self.at) for index, size in enumerate(self.tensor.shape))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def solve(source: Source, tensors: Mapping[str, LazyTensor]) -> Any:
    return match(source.schema(), source.source_map, source.dims, tensors, source.other_keys)


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Source]:
    folder = tmp_path_factory.mktemp("source")
    return request.param, inspect_source(SOURCES[request.param](folder / "checkpoint.nemo"), 1, "fp32")


def consumed(source: Source) -> list[str]:
    """Keys that a conversion uses: those of the first and the last layer, and those without a layer."""
    layers = {key: split_layer(key)[1] or 0 for key in source.tensors}
    ends = (0, max(layers.values()))
    return [key for key, layer in layers.items() if layer in ends and not source.source_map.is_ignored(key)]


def test_each_tensor_that_is_left_out_is_missed(source: tuple[str, Source]) -> None:
    _, opened = source
    assert solve(opened, opened.tensors)
    keys = consumed(opened)
    assert len(keys) > 10
    for key in keys:
        with pytest.raises(CheckpointError) as refused:
            solve(opened, {other: tensor for other, tensor in opened.tensors.items() if other != key})
        lost = opened.source_map.targets(key)
        assert any(name in str(refused.value) for name in (key, *lost)), key


def test_each_dimension_that_is_smaller_is_seen(source: tuple[str, Source]) -> None:
    _, opened = source
    for key in consumed(opened):
        for axis in range(len(opened.tensors[key].shape)):
            with pytest.raises(CheckpointError) as refused:
                solve(opened, {**opened.tensors, key: Shrunk(opened.tensors[key], axis)})
            assert key in str(refused.value)


def test_zeros_are_said(tmp_path: Path) -> None:
    """A model without biases is converted, and told of; with one of them more it is refused."""
    state = {key: value for key, value in gpt_state().items() if not key.endswith("bias")}
    source = inspect_source(write_gpt(tmp_path / "gpt.nemo", state, bias=False), 1, "fp32")
    assert any("zeros" in remark and "attention.dense.bias" in remark for remark in source.remarks)
    assert not any("zeros" in remark for remark in inspect_source(write_gpt(tmp_path / "2.nemo"), 1, "fp32").remarks)


@pytest.mark.parametrize("bias", [None, True])
def test_zeros_need_a_word_of_the_configuration_or_of_every_layer(bias: bool | None, tmp_path: Path) -> None:
    state = {key: value for key, value in gpt_state().items() if "dense_h_to_4h.bias" not in key}
    path = write_gpt(tmp_path / "gpt.nemo", state, **({} if bias is None else {"bias": bias}))
    if bias:
        with pytest.raises(CheckpointError, match="does not say that there is none"):
            inspect_source(path, 1, "fp32")
    else:
        assert any("dense_h_to_4h.bias" in remark for remark in inspect_source(path, 1, "fp32").remarks)


def test_only_a_model_without_biases_gets_zeros(source: tuple[str, Source]) -> None:
    name, opened = source
    said = zeros_made(solve(opened, opened.tensors))
    assert bool(said) == (name in ("gpt_neox without biases of attention",))
    assert not said or "query_key_value" in said[0]


@pytest.mark.parametrize("kind", ["hugging face", "nemo"])
def test_an_output_projection_of_its_own_is_not_replaced_by_the_embedding(kind: str, tmp_path: Path) -> None:
    """What config says of it counts, not whether it is there."""
    if kind == "nemo":
        model = huggingface_t5(is_multilingual=True, feed_forward_proj="gated-gelu", num_decoder_layers=4)
        plain = {k: v for k, v in plain_from_huggingface(model).items() if "lm_head" not in k}
        config = {**relative_config(Saving(), "geglu"), "share_decoder_tokens_head_embeddings": False}
        path = write_nemo(tmp_path / "t5.nemo", config, nemo_states(plain, HEADS, Saving()), files=VOCABULARY)
    else:
        path = huggingface_t5_files(tmp_path / "t5")  # tied, so that there is none
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight  .* has no source"):
        inspect_source(path, 1, "fp32")


def test_a_prompt_table_of_fewer_rows_than_its_template_says(tmp_path: Path) -> None:
    write_gpt(tmp_path / "gpt.nemo")
    templates = [{"taskname": "one", "total_virtual_tokens": 3}]
    write_tables(tmp_path / "tuned.nemo", {"one": 2}, task_templates=templates)
    with pytest.raises(CheckpointError, match="has 2 rows, and its template says total_virtual_tokens: 3"):
        inspect_source(tmp_path, 1, "fp32")
