"""What megatron-core itself computes and saves of DeepSeek's blocks, against transformers' logits and bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import core_latent
from support.checkpoints.core_latent import with_predictor
from support.checkpoints.llama_configs import padded_vocabulary
from support.checkpoints.llama_files import chunked, write_torch_dist
from support.checkpoints.llama_reading import read_torch_dist
from support.checkpoints.llama_state import core_state
from support.tiny_models.llama_models import VOCAB, logits, saved, tensors
from with_megatron_core.latent import work

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

IMPORTED = ["megatron.core.dist_checkpointing", "megatron.core.models.gpt.gpt_layer_specs"]
MODELS = [("deepseek_v2", 1, 0), ("deepseek_v2", 2, 0), ("deepseek_v3", 2, 1), ("moonlight", 1, 0)]


@pytest.mark.parametrize(("name", "ranks", "predictors"), MODELS, ids=str)
def test_logits_names_and_bytes(name: str, ranks: int, predictors: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = saved(name)
    expected = with_predictor(source.tensors) if predictors else source.tensors
    state = core_latent.local_names(core_state(expected, source.config, padded_vocabulary(source.config, ranks)))
    arrays = chunked(state, 1, is_stacked=False)
    (whole := tmp_path / "whole").mkdir()
    write_torch_dist(whole, arrays, "")
    torch.multiprocessing.set_forkserver_preload(IMPORTED)
    torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        work, (ranks, name, predictors, whole, tmp_path), nprocs=ranks, start_method="forkserver"
    )
    computed = torch.load(tmp_path / "logits.pt")[..., :VOCAB].numpy()
    # Moonlight's epsilon of 1e-5 is that of all norms here, and not of the two within attention in transformers.
    most = 1e-4 if name == "moonlight" else 1e-5
    assert np.abs(computed - source.logits).max() < most
    ours, theirs = read_torch_dist(whole), read_torch_dist(tmp_path / "distributed/iter_0000500")
    assert sorted(ours) == sorted(theirs)
    assert all((ours[key] == theirs[key]).all() for key in ours)
    for form in ("plain", "distributed"):
        hub = tmp_path / f"{form}-hub"
        convert(ConvertArguments(tmp_path / form, hub, weight_data_type="fp32", format="huggingface"))
        made = tensors(hub)
        assert sorted(made) == sorted(expected)
        assert not [key for key, value in expected.items() if not torch.equal(made[key], value)]
        model = AutoModelForCausalLM.from_pretrained(hub).eval()
        assert np.abs(logits(model) - computed).max() < most
