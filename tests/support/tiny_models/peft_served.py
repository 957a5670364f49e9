"""Adapters of PEFT on one tiny Llama and what it computes with each set, stored in tests/data/peft/served.

Made by PEFT 0.21.2 (``pip install peft==0.21.2``), from the repository's root:

    PYTHONPATH=tests:. python -m support.tiny_models.peft_served

One model holds all adapters; the logits of a name are those after ``set_adapter``, in fp32, and ``plain`` those within
``disable_adapter``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from support.tiny_models.huggingface_models import filling, logits
from support.tiny_models.llama_models import build

DATA = Path(__file__).parents[2] / "data/peft/served"
FAMILY, PLAIN = "llama", "plain"
INPUT_IDS = np.random.default_rng(44).integers(3, 120, (1, 24))
_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "all": {"r": 3, "lora_alpha": 6, "target_modules": _ALL},
    "roots": {
        **{"r": 4, "lora_alpha": 5, "target_modules": _ALL, "use_rslora": True},
        **{"rank_pattern": {"o_proj": 7}, "alpha_pattern": {"1.mlp.up_proj": 9}},
    },
    "few": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
}


def record() -> None:
    """Make the adapters and the logits with PEFT."""
    import peft  # type: ignore[import-not-found]  # it is needed to make the data, not to read it
    import torch

    configs = {name: peft.LoraConfig(task_type="CAUSAL_LM", **told) for name, told in ADAPTERS.items()}
    first, *others = configs
    model = peft.get_peft_model(build(FAMILY), configs[first], adapter_name=first)
    for name in others:
        model.add_adapter(name, configs[name])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".lora_" in key:
                parameter.copy_(torch.from_numpy(filling(key, tuple(parameter.shape))))
    shutil.rmtree(DATA, ignore_errors=True)
    model.save_pretrained(DATA)
    for left in DATA.rglob("README.md"):
        left.unlink()
    found = {}
    for name in configs:
        model.set_adapter(name)
        found[name] = logits(model, INPUT_IDS)
    with model.disable_adapter():
        found[PLAIN] = logits(model, INPUT_IDS)
    np.savez_compressed(DATA / "logits.npz", **found)


if __name__ == "__main__":
    record()
