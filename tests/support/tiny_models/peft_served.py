"""Adapters of PEFT on tiny models and what these compute with each set, stored in tests/data/peft/served.

Made by PEFT 0.21.2 (``pip install peft==0.21.2``), from the repository's root, of the families that are named:

    PYTHONPATH=tests:. python -m support.tiny_models.peft_served llama qwen3_next

One model holds all adapters; the logits of a name are those after ``set_adapter``, in fp32, and ``plain`` those within
``disable_adapter``.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from support.tiny_models.huggingface_models import filling, logits
from support.tiny_models.llama_models import LOUD, build

DATA = Path(__file__).parents[2] / "data/peft/served"
PLAIN = "plain"
INPUT_IDS = np.random.default_rng(44).integers(3, 120, (1, 24))
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
_ALL = [*_ATTENTION, "gate_proj", "up_proj", "down_proj"]


def _hybrid(states: list[str], others: list[str]) -> dict[str, dict[str, Any]]:
    """Describe an adapter of all layers, and one of those with states alone."""
    return {
        "all": {"r": 3, "lora_alpha": 6, "target_modules": [*states, *others]},
        "states": {
            **{"r": 2, "lora_alpha": 5, "target_modules": states, "use_rslora": True},
            **{"rank_pattern": {states[0]: 5}, "alpha_pattern": {states[-1]: 7}},
        },
    }


FAMILIES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "llama": {
        "all": {"r": 3, "lora_alpha": 6, "target_modules": _ALL},
        "roots": {
            **{"r": 4, "lora_alpha": 5, "target_modules": _ALL, "use_rslora": True},
            **{"rank_pattern": {"o_proj": 7}, "alpha_pattern": {"1.mlp.up_proj": 9}},
        },
        "few": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    },
    # PEFT refuses the out_proj of Mamba's layers, and means experts' arrays too by Qwen3-Next's gate_proj to down_proj.
    "nemotron3_latent": _hybrid(["in_proj"], [*_ATTENTION, *_ALL[-2:], "fc1_latent_proj", "fc2_latent_proj"]),
    "falcon_h1": _hybrid(["in_proj"], _ALL),
    "qwen3_next": _hybrid(["in_proj_qkvz", "in_proj_ba", "out_proj"], _ATTENTION),
    "qwen3_5": _hybrid(["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"], _ALL),
    # PEFT saves the head that it was trained on too; Gemma 2's is the embedding.
    "qwen3": {
        "head": {"r": 3, "lora_alpha": 6, "target_modules": ["lm_head", *_ATTENTION]},
        "none": {"r": 2, "lora_alpha": 4, "target_modules": _ATTENTION},
    },
    "gemma2": {
        "head": {"r": 3, "lora_alpha": 3, "target_modules": ["lm_head"]},
        "both": {"r": 2, "lora_alpha": 4, "target_modules": ["lm_head", "down_proj"]},
    },
    "deepseek_v3": {
        "all": {"r": 3, "lora_alpha": 6, "target_modules": [*_LATENT, "gate"]},
        "up": {"r": 5, "lora_alpha": 5, "target_modules": ["kv_b_proj"]},
    },
    "mixtral": {
        "all": {"r": 2, "lora_alpha": 4, "target_modules": _ATTENTION, "target_parameters": ["gate.weight"]},
        "router": {"r": 3, "lora_alpha": 9, "target_modules": ["gate"]},
    },
    "qwen3_5_moe": {
        "gates": {
            **{"r": 2, "lora_alpha": 6, "target_modules": ["shared_expert_gate", "in_proj_qkv"]},
            "target_parameters": ["mlp.gate.weight"],
        },
        "one": {"r": 4, "lora_alpha": 4, "target_modules": ["shared_expert_gate"], "layers_to_transform": [2]},
    },
}
"""Settings by family and name; of some classes PEFT makes a parameter of a router that is named as a module."""
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "falcon_h1": LOUD,
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), {"rms_norm_eps": 1e-2}),  # see test_engine_hybrids
}


def record(family: str) -> None:
    """Make a family's adapters and the logits with PEFT."""
    import peft  # type: ignore[import-not-found]  # it is needed to make the data, not to read it
    import torch

    configs = {name: peft.LoraConfig(task_type="CAUSAL_LM", **told) for name, told in FAMILIES[family].items()}
    first, *others = configs
    model = peft.get_peft_model(build(family, **CHANGES.get(family, {})), configs[first], adapter_name=first)
    for name in others:
        model.add_adapter(name, configs[name])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".lora_" in key:
                parameter.copy_(torch.from_numpy(filling(key, tuple(parameter.shape))))
    data = DATA / family
    shutil.rmtree(data, ignore_errors=True)
    model.save_pretrained(data)
    for left in data.rglob("README.md"):
        left.unlink()
    found = {}
    for name in configs:
        model.set_adapter(name)
        found[name] = logits(model, INPUT_IDS)
    with model.disable_adapter():
        found[PLAIN] = logits(model, INPUT_IDS)
    np.savez_compressed(data / "logits.npz", **found)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        record(each)
