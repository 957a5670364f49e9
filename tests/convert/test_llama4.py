"""Llama 4 of Megatron: what its class of transformers has not is refused by name, and what differs is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.checkpoints.llama_sources import Case, write_source

from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.targets.huggingface.plan import Wish, plan_huggingface
from handover.errors import CheckpointError
from models.decoder import Decoder
from models.engine_limits import beyond_engine

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
_PLAIN = {"transformer_layer_spec": {"_target_": "megatron.bridge.models.gpt_provider.default_layer_spec"}}
_PLAIN |= {"nope_layer_interval": None, "attention_chunk_size": None}


def run_of(folder: Path, **changes: Any) -> Path:
    """A run of Megatron-Bridge, with other fields than its own."""
    write_source(Case("llama4_scout", "Bridge"), folder)
    file = folder / "iter_0000007/run_config.yaml"
    run = yaml.safe_load(file.read_text())
    run["model"] |= changes
    file.write_text(yaml.safe_dump(run))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({**_PLAIN, "no_rope_freq": 4}, r"qk_l2_norm: True  \(beside no_rope_freq\)"),
        ({"qk_layernorm": True}, r"qk_l2_norm: True  \(beside qk_layernorm\)"),
        ({**_PLAIN, "nope_layer_interval": 4}, "nope_layer_interval: 4  .the specification of Llama 4's layers alone"),
        ({**_PLAIN, "attention_chunk_size": 5}, "attention_chunk_size: 5  .the specification of Llama 4's layers"),
        ({"no_rope_freq": 4}, "no_rope_freq: 4  .Llama 4's layers do not read it"),
        ({"attention_chunk_size": None}, "attention_chunk_size: none"),
        ({"moe_router_topk": 2}, "moe_apply_probs_on_input: True  .a token has one expert then"),
        ({"moe_apply_probs_on_input": False}, r"moe_router_score_function: sigmoid  .beside rotary_interleaved"),
        ({"rotary_interleaved": False}, r"attention.rotates_neighbours: False  .llama4_text has True"),
        ({"moe_shared_expert_intermediate_size": None}, "shared_experts.* which this model does not have"),
    ],
)
def test_what_no_class_computes_is_refused_by_name(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        plan_huggingface(find_archive(run_of(tmp_path / "run", **changes)), Wish("fp32", 10**9))


def test_chunks_in_every_layer_are_said_and_the_engine_computes_them(tmp_path: Path) -> None:
    source = open_source(find_archive(run_of(tmp_path / "run")), for_shards=False)
    assert [line for line in source.remarks if line.startswith("every layer sees chunks of 5 tokens")]
    assert isinstance(source.dims, Decoder)
    assert {layer.chunk for layer in source.dims.layers} == {5} and not beyond_engine(source.dims)
