"""The committed list of fields is the installed package's, and so is what its fields do to its logits."""

from __future__ import annotations

import json

import pytest
import torch
from support.checkpoints.megatron_core_record import compare_or_record
from with_megatron_core.fields import DATA, installed
from with_megatron_core.variants import work

MUST_DIFFER = {
    *("window_size", "window_attn_skip_freq", "softmax_type", "no_rope_freq", "attention_output_gate"),
    *("moe_router_group_topk", "moe_router_load_balancing_type", "moe_router_pre_softmax", "moe_layer_freq"),
    *("moe_router_force_load_balancing", "moe_expert_capacity_factor", "moe_router_score_function"),
}


def test_the_committed_list_is_that_of_the_installed_package() -> None:
    assert json.loads(json.dumps(installed())) == json.loads(DATA.read_text())["megatron-core 0.16.1"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What megatron-core computes of a decoder and of a mixture with each field changed."""
    folder = tmp_path_factory.mktemp("variants")
    torch.multiprocessing.start_processes(work, (folder,), nprocs=1, start_method="spawn")  # type: ignore[no-untyped-call]
    made: dict[str, dict[str, str]] = json.loads((folder / "found.json").read_text())
    return made


def differs(said: str) -> bool:
    return said.startswith("differs") and float(said.split()[-1]) > 1e-5


def test_the_recorded_effects_are_megatron_cores(found: dict[str, dict[str, str]]) -> None:
    """test_megatron_fields.py compares the verdicts with these."""
    seen = [(name, said) for kind in found.values() for name, said in kind.items()]
    computed = sorted({name for name, said in seen if not said.startswith("refused")})
    changing = sorted({name for name, said in seen if differs(said)})
    assert {*changing} >= MUST_DIFFER
    compare_or_record("effects", {"computed": computed, "changing": changing})
