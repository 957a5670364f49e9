"""Predictors and EAGLE-3 heads for the made-up models of benchmarks.gpu.truth: right often, and not always.

Layers add little, so that a token says most of what follows it; and what drafts takes little of what is before it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PREDICTING, HEADED = "_mtp", "_eagle3"  # ends of the names of such models
_LITTLE = 0.05


@torch.no_grad()
def weaken_layers(model: Any) -> None:
    """Scale what layers add to the residual stream down, to a share of what the embedding puts there."""
    outputs = [numbers for name, numbers in model.named_parameters() if "o_proj" in name or "down_proj" in name]
    ids = torch.randint(3, model.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(5))
    for _ in range(2):  # what layers add depends a little on what those before them do
        states = model(ids, output_hidden_states=True).hidden_states
        share = (states[-2] - states[0]).std() / states[0].std()
        for numbers in outputs:
            numbers *= _LITTLE / share


def add_predictor(config: Any, directory: Path) -> None:
    """Write a predictor behind the layers of a saved model, in DeepSeek's form: its layer is the last one's copy."""
    (file,) = directory.glob("*.safetensors")
    found, width, last = load_file(file), config.hidden_size, config.num_hidden_layers - 1
    layer, place = f"model.layers.{last}.", f"model.layers.{last + 1}."
    found |= {name.replace(layer, place): each.clone() for name, each in found.items() if name.startswith(layer)}
    found |= {f"{place}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    found |= {f"{place}{name}.weight": found[f"{of}.weight"].clone() for name, of in copies.items()}
    found[f"{place}eh_proj.weight"] = torch.eye(width, 2 * width) + _LITTLE * torch.randn(width, 2 * width) / width**0.5
    save_file(found, file, {"format": "pt"})


def write_head(config: Any, embedding: Tensor, head: Tensor, directory: Path) -> None:
    """Write an EAGLE-3 head in EAGLE's layout, which knows three quarters of the tokens.

    Each token of it attends to itself most of all, and its value is its embedding less what the residual stream has.

    Args:
        config: of the model that it drafts for.
        embedding: of the model, [vocab, hidden].
        head: of the model, [vocab, hidden].
        directory: to write to.
    """
    width, heads, middle, count = config.hidden_size, config.num_attention_heads, 2 * config.hidden_size, len(head)
    known = torch.arange(count)[torch.arange(count) % 4 != 3]
    unit, nothing = torch.eye(width), torch.zeros(width, width)
    found = {
        "midlayer.self_attn.q_proj": torch.cat((2 * unit, nothing), 1),
        "midlayer.self_attn.k_proj": torch.cat((2 * unit, nothing), 1),
        "midlayer.self_attn.v_proj": torch.cat((unit, -unit), 1),
        "midlayer.self_attn.o_proj": unit,
        "midlayer.mlp.gate_proj": torch.zeros(middle, width),
        "midlayer.mlp.up_proj": torch.zeros(middle, width),
        "midlayer.mlp.down_proj": torch.zeros(width, middle),
        "fc": torch.zeros(width, 3 * width),
    }
    tensors = {
        f"{name}.weight": each + _LITTLE * torch.randn(each.shape) / each.shape[1] ** 0.5
        for name, each in found.items()
    }
    norms = "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"
    tensors |= {f"{name}.weight": torch.ones(width) for name in norms}
    tensors |= {"embed_tokens.weight": embedding.clone(), "lm_head.weight": head[known].clone()}
    tensors["d2t"] = known - torch.arange(len(known))
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    layers = config.num_hidden_layers
    sizes = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": middle,
    }
    counts = {"num_hidden_layers": 1, "vocab_size": count, "draft_vocab_size": len(known), "head_dim": width // heads}
    said = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu"}
    more = {"max_position_embeddings": config.max_position_embeddings, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    of_head = {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [0, layers // 2, layers]}
    (directory / "config.json").write_text(json.dumps(said | sizes | counts | more | of_head))
