"""Rank files of several expert-parallel ranks, and experts that are cut otherwise than the rest of a model.

The writer places parts as megatron-core does: ranks by ``parallel_state.RankGenerator`` (order tp-cp-ep-dp-pp; experts
with a tensor parallelism of their own), files by Megatron-LM's ``get_checkpoint_name``, and experts as the classes of
``transformer/moe/experts.py`` hold them: ``SequentialMLP``, ``TEGroupedMLP``, ``GroupedMLP``.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints.llama_configs import megatron_lm, padded_vocabulary
from support.checkpoints.llama_files import sentencepiece_model, write_megatron_lm_tree
from support.checkpoints.llama_state import State, core_state, cut, layer_of
from support.tiny_models.llama_models import FP32, Saved, save, saved, tensors

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.convert import convert
from export_scripts.weights.matching import match
from handover.errors import CheckpointError

SEQUENTIAL, GROUPED, ARRAY, MATRIX = "local_experts.<k>", "weight<k>", "one array", "one matrix"


@dataclass(frozen=True)
class Grid:
    """A training's parallelism: tensor, pipeline, expert, and tensor parallelism of the experts."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1

    def ranks(self) -> dict[tuple[int, int, int], int]:
        """(tensor, stage, expert) rank of a file -> its rank in the tensor parallelism of experts."""
        found: dict[tuple[int, int, int], int] = {}
        for stage in range(self.pipeline):
            for rank in range(self.tensor * self.expert * self.expert_tensor):  # a multiple of all of a stage's worlds
                own, expert = rank % self.expert_tensor, rank // self.expert_tensor % self.expert
                place = (rank % self.tensor, stage, expert)
                assert found.setdefault(place, own) == own
        return found


def write(root: Path, source: Saved, grid: Grid, form: str = GROUPED, **changes: object) -> Path:
    """Write one file a place of the grid."""
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, grid.tensor))
    parallel = {
        "tensor_model_parallel_size": grid.tensor,
        "pipeline_model_parallel_size": grid.pipeline,
        "expert_model_parallel_size": grid.expert,
        "expert_tensor_parallel_size": grid.expert_tensor,
    }
    arguments = Namespace(**{**megatron_lm(source.config), **parallel, **changes})
    folder = write_megatron_lm_tree(root)
    for (tensor, stage, expert), own in grid.ranks().items():
        name = f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if grid.pipeline > 1 else "")
        name += f"_{expert:03d}" if grid.expert > 1 else ""
        model = of_rank(state, grid, tensor, stage, expert, own, form)
        (folder / name).mkdir(parents=True)
        content = {"args": arguments, "checkpoint_version": 3.0, "iteration": 500, "model": model}
        torch.save(content, folder / name / "model_optim_rng.pt")
    (root / "tokenizer.model").write_bytes(sentencepiece_model())
    return root


def of_rank(state: State, grid: Grid, tensor: int, stage: int, expert: int, own: int, form: str) -> State:
    """What one rank holds: its part of what is not experts, and its experts, numbered from 0."""
    kept: State = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    count = len({_expert_of(key) for key in state} - {None}) // grid.expert
    layers = (1 + max(layer_of(key) or 0 for key in state)) // grid.pipeline
    for key, value in state.items():
        layer = layer_of(key)
        home = layer // layers if layer is not None else 0 if key.startswith("embedding.") else grid.pipeline - 1
        if home != stage:
            continue
        name = key if layer is None else key.replace(f".layers.{layer}.", f".layers.{layer - stage * layers}.")
        if (number := _expert_of(key)) is None:
            kept[name] = cut(key, value, grid.tensor, tensor)
        elif number // count == expert:
            linear = name.replace(f"local_experts.{number}.", "")
            experts.setdefault(linear, {})[number] = cut(key, value, grid.expert_tensor, own)
    for name, parts in experts.items():
        kept |= spelled(name, [parts[number] for number in sorted(parts)], form)
    return kept


def _expert_of(key: str) -> int | None:
    _, found, rest = key.partition(".local_experts.")
    return int(rest.partition(".")[0]) if found else None


def spelled(name: str, parts: list[torch.Tensor], form: str) -> State:
    """A rank's experts of one linear layer; ``name`` ends with ``experts.linear_fc1.weight``."""
    before, linear = name.rsplit("linear_", 1)
    extra = {f"{before}linear_{linear.split('.')[0]}._extra_state{k or ''}": None for k in range(len(parts))}
    if form == SEQUENTIAL:
        return {f"{before}local_experts.{k}.linear_{linear}": part for k, part in enumerate(parts)}
    if form == GROUPED:
        return {f"{name}{k}": part for k, part in enumerate(parts)} | extra  # type: ignore[dict-item]
    if form == ARRAY:
        return {name: torch.stack(parts)}
    memory = torch.stack(
        [part.T.contiguous() for part in parts]
    )  # [experts, in, out], as GroupedMLP's forward views it
    hidden = memory.shape[1] if linear.startswith("fc1") else memory.shape[2]
    shape = (hidden, -1) if linear.startswith("fc1") else (-1, hidden)
    return {f"{before}weight{linear[2]}": memory.reshape(shape)}


@pytest.mark.parametrize(
    ("name", "grid", "form"),
    [
        ("mixtral", Grid(), GROUPED),
        ("mixtral", Grid(), MATRIX),
        ("mixtral", Grid(expert=2), GROUPED),
        ("mixtral", Grid(expert=4), ARRAY),
        ("mixtral", Grid(pipeline=2, expert=2), SEQUENTIAL),
        ("mixtral", Grid(tensor=2, expert=2, expert_tensor=2), GROUPED),
        ("mixtral", Grid(tensor=2, expert=2, expert_tensor=1), SEQUENTIAL),
        ("mixtral", Grid(tensor=2, expert=1, expert_tensor=1), GROUPED),
        ("mixtral", Grid(tensor=4, pipeline=2, expert=2, expert_tensor=2), MATRIX),
        ("mixtral", Grid(tensor=2, expert=2, expert_tensor=2), MATRIX),
        ("mixtral", Grid(tensor=2, expert=4, expert_tensor=1), ARRAY),
        ("glm4_moe", Grid(pipeline=3, expert=4), GROUPED),
        ("glm4_moe", Grid(tensor=2, pipeline=3, expert=2, expert_tensor=1), MATRIX),
        ("glm4_moe_lite", Grid(tensor=2, expert=4, expert_tensor=1), GROUPED),
        ("qwen3_moe", Grid(tensor=2, expert=2, expert_tensor=2), SEQUENTIAL),
        ("gpt_oss", Grid(expert=2), GROUPED),
        ("gpt_oss", Grid(tensor=2, expert=2, expert_tensor=2), SEQUENTIAL),
        ("gpt_oss", Grid(tensor=2, pipeline=2, expert=2, expert_tensor=1), ARRAY),
    ],
)
def test_the_same_tensors_whichever_rank_had_an_expert(name: str, grid: Grid, form: str, tmp_path: Path) -> None:
    """Of GLM the first layer has no experts: a stage's layers are not counted by them."""
    source = saved(name)
    path = write(tmp_path / "run", source, grid, form)
    for data_type, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        convert(ConvertArguments(path, tmp_path / data_type, 1, data_type, format="huggingface"))
        made = tensors(tmp_path / data_type)
        assert made.keys() == source.tensors.keys()
        kept = {key: value if key.endswith(FP32) else value.to(dtype) for key, value in source.tensors.items()}
        assert not [key for key, value in kept.items() if made[key].dtype != value.dtype]
        assert not [key for key, value in kept.items() if not torch.equal(made[key], value)]
    remarks = open_source(find_archive(path), for_shards=False).remarks
    assert not any("different values" in each for each in remarks)


@pytest.mark.parametrize(
    ("grid", "lost", "words"),
    [
        (Grid(expert=2), "mp_rank_00_001", r"\(tensor of experts, pipeline, expert\) \(0, 0, 1\)"),
        (Grid(tensor=2, expert=2, expert_tensor=1), "mp_rank_01_001", r"\(tensor, pipeline\) \(1, 0\)"),
        (
            Grid(tensor=2, expert=4, expert_tensor=1),
            "mp_rank_01_003",
            r"\(tensor of experts, pipeline, expert\) \(0, 0, 3\)",
        ),
        (Grid(tensor=2), "mp_rank_01", r"\(tensor, pipeline\) \(1, 0\)"),  # the arguments alone say it
        (Grid(tensor=2, pipeline=2), "mp_rank_01_001", r"\(tensor, pipeline\) \(1, 1\)"),
        (Grid(pipeline=2, expert=2), "mp_rank_00_001_000", r"\(tensor of experts, pipeline, expert\) \(0, 1, 0\)"),
    ],
)
def test_a_missing_ranks_file_is_named(grid: Grid, lost: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "run", saved("mixtral"), grid)
    (path / "iter_0000500" / lost / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match=f"lacks the files of the training ranks {words}"):
        open_source(find_archive(path), for_shards=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_tensor_parallel_size": 3}, "expert_tensor_parallel_size 3 does not divide the 1 tensor-parallel"),
        ({"num_experts": 5}, "expert_model_parallel_size 2 does not divide the 5 experts"),
        ({"moe_extended_tp": True}, "moe_extended_tp True"),
        ({"expert_model_parallel_size": 1}, "is there twice"),
    ],
)
def test_what_the_names_and_arguments_cannot_mean_is_refused(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "run", saved("mixtral"), Grid(expert=2), **changes)
    with pytest.raises(CheckpointError, match=words):
        source = open_source(find_archive(path), for_shards=False)
        match(source.schema(), source.source_map, source.dims, source.tensors, source.other_keys)


def test_what_several_expert_ranks_hold_differently_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "run", saved("mixtral"), Grid(expert=2))
    file = path / "iter_0000500/mp_rank_00_001/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["decoder.layers.0.mlp.router.weight"] += 1
    torch.save(content, file)
    (said,) = open_source(find_archive(path), for_shards=False).remarks
    assert "different values of decoder.layers.0.mlp.router.weight" in said


@pytest.mark.parametrize("name", ["olmoe", "minimax_m2"])
def test_parts_of_a_norm_of_all_heads_are_not_taken_for_norms_of_each(name: str, tmp_path: Path) -> None:
    """Of four heads on four ranks each has a part that is as wide as a head; on two ranks the width tells."""
    model = save(name, tmp_path / "hub", num_attention_heads=4, num_key_value_heads=4)
    source = Saved(model.config, tensors(tmp_path / "hub"), np.empty(0))
    path = write(tmp_path / "run", source, Grid(tensor=4, expert_tensor=4))
    with pytest.raises(CheckpointError, match="q_layernorm.weight differs between the 4 training ranks, which"):
        open_source(find_archive(path), for_shards=False)
    path = write(tmp_path / "two", source, Grid(tensor=2, expert_tensor=2))
    convert(ConvertArguments(path, tmp_path / "out", 1, "fp32", format="huggingface"))
    made = tensors(tmp_path / "out")
    assert not [key for key, value in source.tensors.items() if not torch.equal(made[key], value)]


def test_norms_of_each_head_are_read_where_ranks_have_one_head_each(tmp_path: Path) -> None:
    model = save("qwen3_moe", tmp_path / "hub", num_attention_heads=4, num_key_value_heads=4)
    source = Saved(model.config, tensors(tmp_path / "hub"), np.empty(0))
    path = write(tmp_path / "run", source, Grid(tensor=4, expert_tensor=4))
    convert(ConvertArguments(path, tmp_path / "out", 1, "fp32", format="huggingface"))
    made = tensors(tmp_path / "out")
    assert not [key for key, value in source.tensors.items() if not torch.equal(made[key], value)]
