"""Keys of ``config.json`` that vLLM and SGLang read and transformers does not save.

Read in the sources of vLLM 0.33.0 and SGLang 0.5.23, ``models/`` and ``configs/``: ``config.<key>`` without a default,
or with one that is another model's. The values are those of the models of DeepSeek, GLM, MiniMax, LG, Qwen and NVIDIA
on the hub, at the sizes of the tests' models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models.llama_models import save, saved
from support.tiny_models.same_model import assert_same_model

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

_DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
READ: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_DEEPSEEK, "moe_layer_freq": 1},
    "moonlight": {**_DEEPSEEK, "moe_layer_freq": 1},
    "deepseek_v2": {"scoring_func": "softmax", "moe_layer_freq": 1, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {**_DEEPSEEK, "first_k_dense_replace": 1},
    "minimax_m2": {"scoring_func": "sigmoid", "rotary_dim": 8, "rope_theta": 5e6},
    "exaone_moe": {"is_moe_layer": [False, True, True], "rope_theta": 1e6},
    "qwen3_next": {"full_attention_interval": 3, "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "nemotron_h": {"hybrid_override_pattern": "M*M-", "num_hidden_layers": 4, "mamba_n_groups": 2, "mamba_d_conv": 4},
    "nemotron3": {"hybrid_override_pattern": "ME*E", "n_shared_experts": 1},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
}
REFUSED = {"layers_block_type"}
"""In SGLang, whose words for layers are those of the hub's files."""


def converted(source: Path, output: Path) -> dict[str, Any]:
    convert(ConvertArguments(source, output, weight_data_type="fp32", format="huggingface"))
    found: dict[str, Any] = json.loads((output / "config.json").read_text())
    return found


@pytest.mark.parametrize("name", READ)
def test_a_directory_of_transformers_gets_the_keys_that_engines_read(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "source")
    about = tmp_path / "source/config.json"
    config = json.loads(about.read_text())
    about.write_text(json.dumps({key: value for key, value in config.items() if key not in READ[name]}))
    made = converted(tmp_path / "source", tmp_path / "out")
    assert {key: made.get(key) for key in READ[name]} == READ[name]
    assert not made.keys() & REFUSED
    kept = {key: value for key, value in config.items() if value is not None and key not in REFUSED | {"dtype"}}
    assert made.items() >= kept.items()
    assert_same_model(tmp_path / "out", saved(name))


def test_what_is_not_understood_is_copied_and_nothing_added(tmp_path: Path) -> None:
    save("llama", tmp_path / "source")
    about = tmp_path / "source/config.json"
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "factor": 4.0}
    about.write_text(json.dumps({**json.loads(about.read_text()), "rope_parameters": rope}))
    made = converted(tmp_path / "source", tmp_path / "out")
    assert made["rope_parameters"] == rope
    assert "rope_theta" not in made
