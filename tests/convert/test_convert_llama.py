"""Hugging Face's Llama as FT shards, and its relatives as they are read, against transformers' logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.network_runs import open_network, prefill_logits
from support.shards.llama_shards_forward import forward
from support.tiny_models import llama_models
from support.tiny_models.huggingface_models import logits
from support.tiny_models.llama_hub_models import LLAMA3_ROPE, MIXTRAL, MODELS, build_llama, save_llama

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.checkpoints.formats import open_source
from export_scripts.checkpoints.source import Source
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from export_scripts.targets.huggingface.convert import inspect_huggingface
from export_scripts.weights.matching import match
from handover.errors import CheckpointError

WITH_SHARDS = ("llama", "llama 2 70B", "codellama")
INPUT_IDS = np.array([[11, 3, 95, 0, 42, 17, 17, 8, 9, 4, 33, 60], [1, 2, 3, 90, 60, 30, 20, 5, 71, 72, 73, 9]])


def run(source: Path, folder: Path, ranks: int = 1, data_type: str = "fp32") -> Path:
    output = folder / f"{ranks}-gpu"
    convert(ConvertArguments(source, output, ranks, data_type, processes=1))
    return output


@pytest.mark.parametrize("name", WITH_SHARDS)
def test_shards_compute_transformers_logits(name: str, tmp_path: Path) -> None:
    model = save_llama(name, tmp_path / "source")
    wanted = logits(model, INPUT_IDS)
    assert wanted.std() > 0.1, "the model says something"
    for ranks in (1, 2, 4):
        found = forward(run(tmp_path / "source", tmp_path / "out", ranks), INPUT_IDS)
        assert float(np.abs(found - wanted).max()) < 1e-4 * max(1.0, float(np.abs(wanted).max()))


def served(source: Path) -> np.ndarray:
    """Compute the logits of a directory as the engine reads it."""
    logits: np.ndarray = prefill_logits(open_network(source, 1, "Llama"), torch.from_numpy(INPUT_IDS)).numpy()
    return logits


@pytest.mark.parametrize("name", sorted(MODELS.keys() - WITH_SHARDS))
def test_what_has_no_shards_is_read_as_transformers_does(name: str, tmp_path: Path) -> None:
    wanted = logits(save_llama(name, tmp_path), INPUT_IDS)
    assert wanted.std() > 0.1, "the model says something"
    assert float(np.abs(served(tmp_path) - wanted).max()) < 1e-4 * max(1.0, float(np.abs(wanted).max()))
    with pytest.raises(CheckpointError, match=r"does not compute this model\n(.|\n)*export.model.format=huggingface"):
        inspect_source(tmp_path, 1, "fp32")


def test_shards_cut_again_are_the_same_bytes(tmp_path: Path) -> None:
    save_llama("llama 2 70B", tmp_path / "source", dtype=torch.bfloat16)
    direct = run(tmp_path / "source", tmp_path / "direct", 2, "bf16")
    again = run(run(tmp_path / "source", tmp_path / "four", 4, "bf16"), tmp_path / "again", 2, "bf16")
    names = sorted(path.name for path in direct.glob("*.bin"))
    assert names == sorted(path.name for path in again.glob("*.bin"))
    assert [name for name in names if (direct / name).read_bytes() != (again / name).read_bytes()] == []


def opened(path: Path) -> Source:
    """Work the conversion to a directory of Hugging Face out."""
    return inspect_huggingface(path, ConvertArguments(path, path / "out", format="huggingface")).source


def edited(path: Path, **changes: Any) -> Path:
    """Change keys of config.json; ... removes one."""
    config = {**json.loads((path / "config.json").read_text()), **changes}
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return path


def as_of_version_4(path: Path) -> Path:
    """Say what transformers 4 says, in its keys."""
    config = json.loads((path / "config.json").read_text())
    rope = dict(config["rope_parameters"])
    theta, part = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", ...)
    is_plain = rope == {"rope_type": "default"}
    said = {"rope_theta": theta, "partial_rotary_factor": part, "rope_scaling": None if is_plain else rope}
    return edited(path, rope_parameters=..., layer_types=..., **said)


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_of_transformers_4_says_the_same(name: str, tmp_path: Path) -> None:
    save_llama(name, tmp_path)
    assert opened(as_of_version_4(tmp_path)).dims == opened(tmp_path).dims


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama", {"rope_parameters": {**LLAMA3_ROPE, "rope_type": "yarn"}}, "scaling=Yarn("),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": ...},
            "scaling=Dynamic(",
        ),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5  ("),
        ("llama", {"hidden_act": "quick_gelu"}, "hidden_act: quick_gelu  ("),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ("gemma2", {"num_hidden_layers": 10**12, "layer_types": ...}, "num_hidden_layers is 1000000000000, which"),
        ("llama", {"head_dim": 10**400}, "head_dim is"),
        ("llama", {"layer_types": ["sliding_attention"] * 4}, "layer_types: sliding_attention  ("),
        ("qwen2 windowed", {"layer_types": ["linear_attention"] * 4}, "layer_types: linear_attention  ("),
        ("qwen2 windowed", {"layer_types": ["full_attention"]}, "layer_types names 1 layers of 4"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True  ("),
    ],
)
def test_what_cannot_be_had_is_refused_by_key_and_value(
    name: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_llama(name, tmp_path)
    with pytest.raises(CheckpointError) as refused:
        inspect_source(edited(tmp_path, **changes), 1, "fp32")
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama with biases", {"mlp_bias": False}, "mlp.gate_proj.bias"),
        ("llama", {"attention_bias": True}, "self_attn.q_proj.bias"),
    ],
)
def test_tensors_that_the_configuration_denies_or_promises_are_named(
    name: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_llama(name, tmp_path)
    with pytest.raises(CheckpointError, match=named):
        opened(edited(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
        ("mistral", {"use_sliding_window": False}),
        ("starcoder2", {"use_sliding_window": False}),
        ("gemma2", {"use_sliding_window": False, "max_window_layers": 3}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("llama", {"rope_scaling": {**LLAMA3_ROPE, "rope_theta": 300.0}, "original_max_position_embeddings": 8}),
        ("llama", {"hidden_activation": "relu"}),
        ("gemma", {"hidden_act": "silu"}),
        ("gemma", {"hidden_act": "gelu", "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 7}),
    ],
)
def test_a_key_counts_where_transformers_class_reads_it(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """What transformers saved, with another key beside the one that says the same, or one that the class ignores."""
    from transformers import AutoModelForCausalLM

    save_llama(name, tmp_path / "source")
    plain = opened(tmp_path / "source").dims
    source = edited(tmp_path / "source", **changes)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    wanted = logits(model, INPUT_IDS)
    assert float(np.abs(served(source) - wanted).max()) < 1e-4 * max(1.0, float(np.abs(wanted).max()))
    is_ignored = changes.keys() <= {"use_sliding_window", "max_window_layers", "hidden_activation"}
    assert (opened(source).dims == plain) is (is_ignored or changes.get("hidden_act") == "gelu")


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen2", {"rope_scaling": {"type": "axial"}}, "rope_scaling: axial  ("),
        ("llama", {"is_causal": False}, "is_causal: False  ("),
        ("llama", {"per_layer_config": {"1": {"head_dim": 4}}}, "per_layer_config: "),
        ("llama", {"sliding_window": 5}, "sliding_window: 5  ("),
        ("mistral", {"attention_chunk_size": 4}, "attention_chunk_size: 4  ("),
        ("gemma", {"hidden_act": "quick_gelu"}, "hidden_act: quick_gelu  ("),
    ],
)
def test_what_would_change_the_function_is_refused_by_name(
    name: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_llama(name, tmp_path)
    with pytest.raises(CheckpointError) as refused:
        inspect_source(edited(tmp_path, **changes), 1, "fp32")
    assert named in str(refused.value)


def test_ranks_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    save_llama("llama 2 70B", tmp_path)
    with pytest.raises(CheckpointError, match=r"16 does not divide the model's 8 heads\n.*legal: 1, 2, 4, 8"):
        inspect_source(tmp_path, 16, "fp32")


def test_a_mixtral_is_read_and_has_no_shards(tmp_path: Path) -> None:
    build_llama(MIXTRAL[0], **MIXTRAL[1]).save_pretrained(tmp_path)
    source = open_source(open_archive(tmp_path))
    assignments = match(source.schema(), source.source_map, source.dims, source.tensors, source.other_keys)
    assert sum("experts" in each.name for each in assignments) == 4 * 4 * 3
    with pytest.raises(CheckpointError, match=r"mixture = Mixture.expert_num=4, (.|\n)*format=huggingface"):
        inspect_source(tmp_path, 1, "fp32")
    with pytest.raises(CheckpointError, match="expert_num is 1,000,000,000, which no model has"):
        inspect_source(edited(tmp_path, num_local_experts=10**9), 1, "fp32")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("olmo2", r"norms.is_before = False  (.|\n)*format=huggingface"),
        ("olmo2", r"attention.qk_norm = projection  (.|\n)*format=huggingface"),
        ("gemma3", r"layers.rotary = Rotary.width=16, base=700.0, .*, Rotary(.|\n)*format=huggingface"),
        ("llama_yarn", r"layers.rotary = Rotary.*Yarn(.|\n)*format=huggingface"),
        ("granite", r"residual_multiplier = 0.5  \(its config.ini has no key for it\)(.|\n)*format=huggingface"),
        ("smollm3", r"layers.rotary = Rotary.*None(.|\n)*format=huggingface"),
    ],
)
def test_what_no_shards_can_say_is_refused_for_them(name: str, reason: str, tmp_path: Path) -> None:
    llama_models.build(name).save_pretrained(tmp_path)
    source = open_source(open_archive(tmp_path))
    assert match(source.schema(), source.source_map, source.dims, source.tensors, source.other_keys)
    with pytest.raises(CheckpointError, match=reason):
        inspect_source(tmp_path, 1, "fp32")
