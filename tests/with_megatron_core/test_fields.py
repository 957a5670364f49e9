"""The committed list of fields is the installed package's, and megatron-core's own logits bear the verdicts out."""

from __future__ import annotations

import json

import pytest
import torch
from with_megatron_core.fields import DATA, installed
from with_megatron_core.variants import work

from export_scripts.checkpoints.nemo.core_fields import CORE_HONOURED, CORE_LIMITS, ROUTER_LIMITS
from export_scripts.checkpoints.nemo.core_without_effect import WITHOUT_EFFECT

HARMLESS = {name for names in WITHOUT_EFFECT.values() for name in names}
READ = {*CORE_HONOURED, *CORE_LIMITS, *ROUTER_LIMITS}
# The others need a GPU, Transformer Engine, several processes, or another field.
FEWEST_COMPUTED = 140
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


def test_no_field_that_is_said_to_be_without_effect_changes_a_logit(found: dict[str, dict[str, str]]) -> None:
    computed = [name for kind in found.values() for name, said in kind.items() if not said.startswith("refused")]
    assert len([name for name in computed if name in HARMLESS]) >= FEWEST_COMPUTED
    assert not {
        name: said for kind in found.values() for name, said in kind.items() if name in HARMLESS and differs(said)
    }


def test_every_field_that_changes_a_logit_is_honoured_or_refused(found: dict[str, dict[str, str]]) -> None:
    changing = {name for kind in found.values() for name, said in kind.items() if differs(said)}
    assert changing >= MUST_DIFFER
    assert changing <= READ
