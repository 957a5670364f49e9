"""Checkpoints of Megatron-FSDP (``fsdp_dtensor``), saved by torch's own distributed checkpointing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints.dcp_checkpoints import write_bridge, write_lm
from support.checkpoints.llama_files import sentencepiece_model
from support.tiny_models.llama_models import Saved, saved, tensors

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.convert import convert
from handover.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def assert_the_same_tensors(path: Path, output: Path, source: Saved, dtype: torch.dtype) -> None:
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    convert(ConvertArguments(path, output, 1, name, format="huggingface"))
    made = tensors(output)
    assert made.keys() == source.tensors.keys()
    assert not [key for key, value in source.tensors.items() if made[key].dtype != value.dtype]
    assert not [key for key, value in source.tensors.items() if not torch.equal(made[key], value)]


@pytest.mark.parametrize(("name", "ranks"), [("qwen3", 4), ("nemotron", 1), ("gemma2", 3)])
def test_megatron_bridges(name: str, ranks: int, tmp_path: Path) -> None:
    source = saved(name, torch.bfloat16)
    path = write_bridge(tmp_path / "run", source, ranks)
    assert_the_same_tensors(path, tmp_path / "hub", source, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "ranks", "dtype"),
    [
        ("llama", 3, torch.float32),
        ("llama32", 1, torch.float32),
        ("mixtral", 2, torch.float32),
        ("glm4_moe", 3, torch.bfloat16),  # but for the biases that choose experts
        ("glm4_moe_lite", 2, torch.float32),
    ],
)
def test_megatron_lms(name: str, ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """The training's arguments are an object among the tensors."""
    source = saved(name, dtype)
    assert_the_same_tensors(write_lm(tmp_path / "run", source, ranks), tmp_path / "hub", source, dtype)


def test_gates_in_one_matrix_in_the_order_of_the_ranks_are_refused(tmp_path: Path) -> None:
    """Only SwiGLU's are taken apart when Megatron-FSDP saves; the rows of others are those of rank after rank."""
    path = write_bridge(tmp_path / "run", saved("gemma2"), 2, tensor_model_parallel_size=2)
    with pytest.raises(CheckpointError, match="Megatron-FSDP with tensor_model_parallel_size 2 .*in the order of the"):
        open_source(find_archive(path))
    swiglu = write_bridge(tmp_path / "swiglu", saved("qwen3"), 2, tensor_model_parallel_size=2)
    assert open_source(find_archive(swiglu))


def test_what_is_missing_or_damaged_is_one_error(tmp_path: Path) -> None:
    path = write_lm(tmp_path / "run", saved("llama"), 2)
    (path / "tokenizer.model").write_bytes(sentencepiece_model())
    file = max((path / "iter_0000500").glob("*.distcp"), key=lambda each: each.stat().st_size)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=f"is not within iter_0000500/{file.name}"):
        open_source(find_archive(path))
    file.unlink()
    with pytest.raises(CheckpointError, match=f"is not within iter_0000500/{file.name}"):
        open_source(find_archive(path))
