"""A T5 with random weights as shards."""

from __future__ import annotations

from typing import Any

import torch
from transformers import T5Config, T5ForConditionalGeneration

from support.tiny_models.huggingface_models import VOCAB


def random_t5(**changes: Any) -> Any:
    torch.manual_seed(3)
    dims = {"vocab_size": VOCAB, "d_model": 24, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(**dims, relative_attention_num_buckets=8, **changes)  # type: ignore[arg-type]
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_table = "shared" in name or "lm_head" in name
            scale = 1.0 if is_table or "bias" in name else 0.3
            parameter.copy_(torch.randn(parameter.shape) * scale + ("norm" in name))
    return model
