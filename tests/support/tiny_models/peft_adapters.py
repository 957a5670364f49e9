"""Adapters and logits of PEFT on the tiny Hugging Face models, stored in tests/data/peft.

Made by PEFT 0.21.2 (``pip install peft==0.21.2``), from the repository's root:

    PYTHONPATH=tests:. python -m support.tiny_models.peft_adapters tests/data/peft

Each adapter is what ``save_pretrained`` writes; the logits are those of ``merge_and_unload`` in fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from support.tiny_models import huggingface_models, llama_models
from support.tiny_models.huggingface_models import filling, logits

DATA = Path(__file__).parents[2] / "data/peft"
INPUT_IDS = np.array([[11, 3, 95, 0, 42, 17, 17, 8], [1, 2, 3, 90, 60, 30, 20, 5]])
ADAPTERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("gpt2", {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gptj_rslora": ("gptj", {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
    "gpt_neox_patterns": (
        "gpt_neox",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["query_key_value", "dense", "dense_4h_to_h"],
            "rank_pattern": {"dense": 5},
            "alpha_pattern": {"0.attention.dense": 7},
        },
    ),
    "llama": (
        "llama",
        {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        },
    ),
    "gpt_neox_head": (
        "gpt_neox",
        {"r": 2, "target_modules": ["dense_h_to_4h"], "modules_to_save": ["lm_head"], "layers_to_transform": [1]},
    ),
}


def build(family: str) -> Any:
    """Build the model of a family."""
    return (llama_models if family in llama_models.MODELS else huggingface_models).build(family)


def write(name: str, directory: Path) -> None:
    """Make one adapter and its logits with PEFT."""
    import peft  # type: ignore[import-not-found]  # it is needed to make the data, not to read it
    import torch

    family, options = ADAPTERS[name]
    model = peft.get_peft_model(build(family), peft.LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".lora_" in key or ".modules_to_save." in key:
                parameter.copy_(torch.from_numpy(filling(key, tuple(parameter.shape))))
    model.save_pretrained(directory / name)
    (directory / name / "README.md").unlink()
    np.save(directory / f"{name}.logits.npy", logits(model.merge_and_unload(), INPUT_IDS))


if __name__ == "__main__":
    for each in ADAPTERS:
        write(each, Path(sys.argv[1]))
