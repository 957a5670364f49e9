"""What megatron-core itself saves of Llama-like models, against its own logits and the independent writer's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints.llama_configs import padded_vocabulary
from support.checkpoints.llama_files import chunked, write_torch_dist
from support.checkpoints.llama_reading import read_torch_dist
from support.checkpoints.llama_state import core_state
from support.checkpoints.megatron_core_record import compare_or_record, digest_of
from support.tiny_models.llama_models import VOCAB, logits, saved, tensors
from with_megatron_core.llama import work

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

# What every rank needs and takes seconds to import: ranks are forked from a process that has done so.
IMPORTED = [
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt.gpt_layer_specs",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen3.modeling_qwen3",
]
MODELS = [("llama", 2), ("llama31", 1), ("llama32", 2), ("qwen3", 2), ("mistral", 1)]


@pytest.fixture(scope="module", params=MODELS, ids=lambda case: f"{case[0]}, {case[1]} ranks")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, Path]:
    """A model that as many ranks of megatron-core hold, compute and save."""
    name, ranks = request.param
    folder = tmp_path_factory.mktemp("trained")
    torch.multiprocessing.set_forkserver_preload(IMPORTED)
    torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        work, (ranks, name, folder), nprocs=ranks, start_method="forkserver"
    )
    return name, ranks, folder


def test_megatron_cores_logits_are_transformers(trained: tuple[str, int, Path]) -> None:
    """The weights lie in megatron-core as this project's tests say."""
    name, _, folder = trained
    made = torch.load(folder / "logits.pt")[..., :VOCAB].numpy()
    assert np.abs(made - saved(name).logits).max() < 1e-5


def test_the_independent_writer_writes_what_megatron_core_writes(
    trained: tuple[str, int, Path], tmp_path: Path
) -> None:
    """The same arrays under the same names: Transformer Engine's, which megatron-core's own norms are saved by, too."""
    name, ranks, folder = trained
    source = saved(name)
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, ranks))
    write_torch_dist(tmp_path / "ours", chunked(state, ranks))
    ours, theirs = read_torch_dist(tmp_path / "ours"), read_torch_dist(folder / "nemo2/weights")
    assert sorted(ours) == sorted(theirs)
    assert all((ours[key] == theirs[key]).all() for key in ours)


def test_the_recorded_arrays_are_megatron_cores(trained: tuple[str, int, Path]) -> None:
    """The suite without megatron-core compares the writer's with these."""
    name, ranks, folder = trained
    compare_or_record("arrays", {f"{name}, {ranks} ranks": digest_of(read_torch_dist(folder / "nemo2/weights"))})


@pytest.mark.parametrize("form", ["nemo2", "distributed", "plain"])
def test_hugging_faces_directory_has_the_same_bytes_and_logits(
    form: str, trained: tuple[str, int, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    name, _, folder = trained
    convert(ConvertArguments(folder / form, tmp_path, weight_data_type="fp32", format="huggingface"))
    made = tensors(tmp_path)
    assert sorted(made) == sorted(saved(name).tensors)
    assert all(torch.equal(made[key], value) for key, value in saved(name).tensors.items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = torch.load(folder / "logits.pt")[..., :VOCAB].numpy()
    assert np.abs(logits(model) - expected).max() < 1e-5
