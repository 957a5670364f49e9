"""Whether a converted directory is the model that transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from support.tiny_models.llama_models import VOCAB, Saved, logits, tensors


def assert_same_model(root: Path, source: Saved) -> float:
    """Compare names, types and bytes of all tensors, and transformers' logits after loading without a complaint.

    Returns:
        The largest difference of the logits.
    """
    from transformers import AutoModelForCausalLM

    made = tensors(root)
    assert sorted(made) == sorted(source.tensors)
    for key, expected in source.tensors.items():
        assert made[key].dtype == expected.dtype, key  # transformers keeps some in fp32
        assert made[key].shape == expected.shape, key
        assert torch.equal(made[key], expected), key
    assert json.loads((root / "config.json").read_text())["vocab_size"] == VOCAB
    model, loading = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), loading
    model.set_attn_implementation("eager")
    assert type(model.config) is type(source.config)
    difference = float(np.abs(logits(model.eval()) - source.logits).max())
    assert difference < 1e-5
    return difference
