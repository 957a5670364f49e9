"""LoRA adapters of the tiny Llama-like models: products of thin matrices, and the logits that they lead to."""

from __future__ import annotations

import numpy as np
import torch

from support.tiny_models.llama_models import build, logits, saved

RANK, ALPHA = 4, 5.0
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
GATES = ("mlp.gate_proj", "mlp.up_proj")


def products(name: str, is_fused: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """linear_in and linear_out of each projection by transformers' name; a fused adapter shares linear_in."""
    generator = torch.Generator().manual_seed(11)
    weights = {key: value for key, value in saved(name).tensors.items() if key.endswith("_proj.weight")}
    weights = dict(sorted(weights.items(), key=lambda entry: ("q_proj" not in entry[0], entry[0])))  # gate precedes up
    made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for key, weight in weights.items():
        down = torch.randn(RANK, weight.shape[1], generator=generator) / 8
        for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
            for other in others:
                if is_fused and other in key:
                    shared = made.get(key.replace(other, first))
                    down = down if shared is None else shared[0]
        made[key] = down, torch.randn(weight.shape[0], RANK, generator=generator) / 8
    return made


def merged_logits(name: str, adapter: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> np.ndarray:
    """transformers' logits with alpha / r times the products added to the weights."""
    model = build(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key in adapter:
                down, up = adapter[key]
                parameter += ALPHA / RANK * up @ down
    return logits(model)
