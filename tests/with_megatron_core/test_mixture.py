"""What megatron-core's ranks themselves hold and save of a mixture, converted: the same bytes as transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints.llama_configs import padded_vocabulary
from support.checkpoints.llama_files import chunked, write_torch_dist
from support.checkpoints.llama_state import core_state
from support.tiny_models.llama_models import saved, tensors
from with_megatron_core.mixture import Grid, work, world_of

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

IMPORTED = ["megatron.core.dist_checkpointing", "megatron.core.models.gpt.gpt_layer_specs"]


@pytest.mark.parametrize(
    ("name", "grid"),
    [*(("mixtral", grid) for grid in ((1, 2, 1), (2, 2, 1), (2, 1, 1), (2, 2, 2))), ("gpt_oss", (2, 2, 1))],
)
def test_rank_files_and_distributed_ones(name: str, grid: Grid, tmp_path: Path) -> None:
    source = saved(name)
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, 2))
    # megatron-core's local specification has no fused norms, and saves them by the names of those that are.
    state = {key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"): value for key, value in state.items()}
    whole = tmp_path / "whole"
    whole.mkdir()
    write_torch_dist(whole, chunked(state, 1), "")
    torch.multiprocessing.set_forkserver_preload(IMPORTED)
    torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        work, (name, grid, whole, tmp_path), nprocs=world_of(grid), start_method="forkserver"
    )
    for form in ("plain", "distributed"):
        hub = tmp_path / f"{form}-hub"
        convert(ConvertArguments(tmp_path / form, hub, weight_data_type="fp32", format="huggingface"))
        made = tensors(hub)
        assert sorted(made) == sorted(source.tensors)
        assert not [key for key, value in source.tensors.items() if not torch.equal(made[key], value)]
