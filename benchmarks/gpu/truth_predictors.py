"""Predictors and EAGLE-3 heads for the made-up models of benchmarks.gpu.truth: right often, and not always.

Layers add little, so that a token says most of what follows it; and what drafts takes little of what is before it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PREDICTING, HEADED = "_mtp", "_eagle3"  # ends of the names of such models
_LITTLE = 0.05


@dataclass(frozen=True)
class _Form:
    """How files have a predictor.

    Attributes:
        layers: where its layers are, by number.
        projection: what leads into them.
        norms: of the embedding and the model's output, before that, and of its own output.
        norm: weight that multiplies by 1.
        has_copies: whether it has an embedding and a head of its own.
        count: of its layers; they are the last ones' copies.
    """

    layers: str
    projection: str
    norms: tuple[str, str, str]
    norm: float = 1.0
    has_copies: bool = False
    count: int = 1


def _form_of(model_type: str, layers: int) -> _Form:
    """Return the form of a class's files, of a model of some layers."""
    beside, behind = "mtp.layers.{}.", f"model.layers.{layers}."
    if model_type.startswith("qwen3"):
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
        return _Form(beside, "mtp.fc", norms, norm=0.0)
    first = beside.format(0)
    if model_type == "nemotron_h":
        norms = f"{first}enorm", f"{first}hnorm", f"{beside.format(1)}final_layernorm"
        return _Form(beside, f"{first}eh_proj", norms, count=2)
    norms = f"{behind}enorm", f"{behind}hnorm", f"{behind}shared_head.norm"
    return _Form(behind, f"{behind}eh_proj", norms, has_copies=True)


@torch.no_grad()
def weaken_layers(model: Any) -> None:
    """Scale what layers add to the residual stream down, to a share of what the embedding puts there."""
    ends = "o_proj", "out_proj", "down_proj"
    outputs = [numbers for name, numbers in model.named_parameters() if any(end in name for end in ends)]
    ids = torch.randint(3, model.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(5))
    for _ in range(2):  # what layers add depends a little on what those before them do
        states = model(ids, output_hidden_states=True).hidden_states
        share = (states[-2] - states[0]).std() / states[0].std()
        for numbers in outputs:
            numbers *= _LITTLE / share


def add_predictor(config: Any, directory: Path) -> None:
    """Write a predictor beside or behind the layers of a saved model, in its family's form."""
    (file,) = directory.glob("*.safetensors")
    found, width, layers = load_file(file), config.hidden_size, config.num_hidden_layers
    form = _form_of(config.model_type, layers)
    for number in range(form.count):
        layer = re.compile(rf"(model|backbone)\.layers\.{layers - form.count + number}\.")
        place = form.layers.format(number)
        found |= {layer.sub(place, name): each.clone() for name, each in found.items() if layer.match(name)}
    found |= {f"{name}.weight": torch.full((width,), form.norm) for name in form.norms}
    if form.has_copies:
        copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        found |= {f"{form.layers}{name}.weight": found[f"{of}.weight"].clone() for name, of in copies.items()}
    noise = _LITTLE * torch.randn(width, 2 * width) / width**0.5
    found[f"{form.projection}.weight"] = torch.eye(width, 2 * width) + noise
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
