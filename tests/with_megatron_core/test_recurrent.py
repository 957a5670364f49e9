"""What megatron-core's mixers of Mamba 2 and of the gated delta rule hold and save is what the writers here say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import core_delta_rule, hybrid_models
from support.checkpoints.llama_files import write_torch_dist
from support.checkpoints.llama_reading import read_torch_dist
from with_megatron_core.bridge import source
from with_megatron_core.recurrent import prefixes, work

IMPORTED = ["megatron.core.dist_checkpointing", "megatron.core.tensor_parallel"]
WRITERS: dict[str, Any] = {"nemotron_h": hybrid_models, "qwen3_next": core_delta_rule}


@pytest.mark.parametrize(
    ("name", "ranks"), [("nemotron_h", 1), ("nemotron_h", 2), ("qwen3_next", 1), ("qwen3_next", 2)]
)
def test_names_sections_and_bytes(name: str, ranks: int, tmp_path: Path) -> None:
    model, writer = source(name), WRITERS[name]
    (whole := tmp_path / "whole").mkdir()
    write_torch_dist(whole, writer.arrays(model, 1), "")
    torch.multiprocessing.set_forkserver_preload(IMPORTED)
    torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        work, (ranks, name, whole, tmp_path), nprocs=ranks, start_method="forkserver"
    )
    of_mixers = tuple(prefixes(name))
    wanted = {key: value for key, value in read_torch_dist(whole).items() if key.startswith(of_mixers)}
    saved = read_torch_dist(tmp_path / "distributed")
    assert sorted(saved) == sorted(wanted)
    assert all((saved[key] == wanted[key]).all() for key in wanted)
    of_rank: Callable[..., torch.Tensor] = writer.of_rank
    state = {key: value for key, value in writer.module_state(model, 128).items() if key.startswith(of_mixers)}
    for rank in range(ranks):
        held = torch.load(tmp_path / f"rank{rank}.pt")
        mine = {key: of_rank(key, value, model.config, ranks, rank) for key, value in state.items()}
        mine = {key.replace("conv1d_", "conv1d."): value for key, value in mine.items()}  # as it was before mid-2026
        assert sorted(held) == sorted(mine)
        assert not [key for key, value in mine.items() if not torch.equal(held[key].cpu(), value)]
