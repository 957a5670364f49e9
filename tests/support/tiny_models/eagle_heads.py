"""Tiny EAGLE-3 heads in both published layouts, and what they say: by modules of transformers, or of speculators."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from support.tiny_models.llama_models import GROUPS, HEADS, HIDDEN, INTER, VOCAB, save

LAYERS, TAPS, DRAFT_VOCAB = {"num_hidden_layers": 6, "max_position_embeddings": 256}, (1, 3, 5), 50
EAGLE, SPECULATORS = "eagle", "speculators"
Change = Callable[[str, Tensor], Tensor]
SIZES = {
    **{"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "intermediate_size": INTER},
    **{"num_hidden_layers": 1, "vocab_size": VOCAB, "max_position_embeddings": 256, "rms_norm_eps": 1e-5},
    **{"head_dim": HIDDEN // HEADS, "attention_bias": False, "tie_word_embeddings": False},
}


@dataclass
class Head:
    """A head, computed over whole texts.

    Attributes:
        model: that it drafts for, transformers' own.
        layer: whose attention has an input of twice the width, of transformers or of speculators.
        embed, fc, norm, lm_head, rotary: beside it.
        targets: the model's token for each of its own.
        taps: indices of the model's hidden states.
        norms_residual, norms_output: see models.eagle3.
    """

    model: Any
    layer: Any
    embed: Any
    fc: Any
    norm: Any
    lm_head: Any
    rotary: Any
    targets: Tensor
    taps: tuple[int, ...] = TAPS
    norms_residual: bool = False
    norms_output: bool = False

    @torch.no_grad()
    def fused(self, ids: list[int]) -> Tensor:
        """Return what ``fc`` makes of the model's hidden states, [1, T, hidden]."""
        states = self.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        fused: Tensor = self.fc(torch.cat([states[tap] for tap in self.taps], -1))
        return fused

    @torch.no_grad()
    def drafts(self, line: list[int], count: int) -> list[int]:
        """Return the tokens that it says behind a text, one after the other."""
        hidden, said = self.fused(line[:-1]), list[int]()
        for _ in range(count):
            given = self._run(torch.tensor([[*line[1:], *said]]), hidden)[:, -1:]
            said.append(int(self.targets[self.lm_head(self.norm(given))[0, -1].argmax()]))
            hidden = torch.cat((hidden, self.norm(given) if self.norms_output else given), 1)
        return said

    def _run(self, ids: Tensor, hidden: Tensor) -> Tensor:
        embeddings, places = self.embed(ids), torch.arange(ids.shape[1])[None]
        mask = create_causal_mask(self.layer.self_attn.config, embeddings, None, None, position_ids=places)
        given = {"attention_mask": mask, "position_embeddings": self.rotary(embeddings, places), "position_ids": places}
        if hasattr(self.layer, "norm_before_residual"):  # speculators' layer does the rest itself
            found: Tensor = self.layer(torch.cat((embeddings, hidden), -1), **given)
            return found
        normed = self.layer.hidden_norm(hidden)
        joined = torch.cat((self.layer.input_layernorm(embeddings), normed), -1)
        x = (normed if self.norms_residual else hidden) + self.layer.self_attn(joined, **given)[0]
        behind: Tensor = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        return behind


def save_with_head(
    model_folder: Path,
    folder: Path,
    layout: str = EAGLE,
    change: Change = lambda _, each: each,
    changes: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    **said: Any,
) -> tuple[Any, Head]:
    """Save a Llama, and a head for it -> transformers' model, and the head.

    Args:
        model_folder, folder: of the model, and of the head.
        layout: EAGLE or SPECULATORS.
        change: of every tensor of the model, by its name, and of the head, with ``head.`` before it.
        changes: of the sizes of the head's layer.
        without: tensors that the head has from the model, or not at all.
        said: more of the head's config.json. A head of the whole vocabulary has the model's embedding and head.
    """
    model = save("llama", model_folder, **LAYERS)
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(change(name, each))
    model.save_pretrained(model_folder)
    config = LlamaConfig(**{**SIZES, **(changes or {})})
    config._attn_implementation = "eager"
    draft_vocab = said.get("draft_vocab_size", DRAFT_VOCAB)
    head = _made(model, config, draft_vocab, said)
    own = {name: change(f"head.{name}", each).contiguous() for name, each in _tensors(head, layout).items()}
    _load(head, own, layout)
    if draft_vocab != VOCAB:
        own["d2t"] = head.targets - torch.arange(draft_vocab)
        own["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, head.targets, True)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: each for name, each in own.items() if name not in without}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    if "embed_tokens.weight" in without:
        head.embed = model.model.embed_tokens
    if "lm_head.weight" in without:
        head.lm_head = model.lm_head
    (folder / "config.json").write_text(json.dumps(_described(config, layout, said)))
    return model, head


def _described(config: LlamaConfig, layout: str, said: Mapping[str, Any]) -> dict[str, Any]:
    of_head = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": list(TAPS), **said}
    if layout == EAGLE:
        return {**config.to_diff_dict(), "architectures": ["LlamaForCausalLMEagle3"], **of_head}
    kind = {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}
    return {**kind, "transformer_layer_config": config.to_diff_dict(), **of_head}


def _made(model: Any, config: LlamaConfig, draft_vocab: int, said: Mapping[str, Any]) -> Head:
    torch.manual_seed(7)
    layer, wide = LlamaDecoderLayer(config, 0), 2 * config.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        own = getattr(layer.self_attn, name)
        setattr(layer.self_attn, name, nn.Linear(wide, own.out_features, bias=own.bias is not None))
    layer.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    head = Head(
        model,
        layer,
        nn.Embedding(VOCAB, config.hidden_size),
        nn.Linear(3 * HIDDEN, config.hidden_size, bias=False),
        LlamaRMSNorm(config.hidden_size, config.rms_norm_eps),
        nn.Linear(config.hidden_size, draft_vocab, bias=False),
        LlamaRotaryEmbedding(config),
        torch.randperm(VOCAB)[:draft_vocab].sort().values if draft_vocab != VOCAB else torch.arange(VOCAB),
        norms_residual=bool(said.get("norm_before_residual")),
        norms_output=bool(said.get("norm_output")),
    )
    for part in (layer, head.embed, head.fc, head.norm, head.lm_head):
        for each in part.parameters():
            torch.nn.init.normal_(
                each, 1.0 if each.dim() == 1 else 0.0, 0.3 if each.dim() == 1 else each.shape[-1] ** -0.5
            )
    if draft_vocab == VOCAB:
        head.embed.weight.data.copy_(model.model.embed_tokens.weight)
        head.lm_head.weight.data.copy_(model.lm_head.weight)
    return head


def _tensors(head: Head, layout: str) -> dict[str, Tensor]:
    place = "midlayer" if layout == EAGLE else "layers.0"
    parts = {place: head.layer, "embed_tokens": head.embed, "fc": head.fc, "norm": head.norm, "lm_head": head.lm_head}
    return {f"{where}.{name}": each.data for where, part in parts.items() for name, each in part.state_dict().items()}


@torch.no_grad()
def _load(head: Head, own: Mapping[str, Tensor], layout: str) -> None:
    for name, each in _tensors(head, layout).items():
        each.copy_(own[name])


def never_wrong(key: str, each: Tensor) -> Tensor:
    """Make a model whose layers add nothing, so that a token says what follows it, and a head that knows that.

    Each token of the head attends to itself alone: queries and keys are biases, which turn with the position, and
    values are the embeddings. See RIGHT.
    """
    name = key.removeprefix("head.")
    if key == name:
        if "o_proj" in key or "down_proj" in key:
            return torch.zeros_like(each)
        return torch.ones_like(each) if key == "model.norm.weight" else each
    if name.endswith(("q_proj.bias", "k_proj.bias")):
        return torch.full_like(each, 60.0)
    if name.endswith("v_proj.weight"):
        return torch.cat((torch.eye(HIDDEN), -torch.eye(HIDDEN)), 1)  # what the residual stream has goes
    if name.endswith("o_proj.weight"):
        return torch.eye(HIDDEN)
    if name.endswith(("layernorm.weight", "norm.weight")):
        return torch.ones_like(each)
    return each if "embed" in name or "lm_head" in name else torch.zeros_like(each)


SHARED: dict[str, Any] = {"without": ("embed_tokens.weight", "lm_head.weight"), "draft_vocab_size": VOCAB}
"""Arguments of a head that has the model's embedding and head."""
RIGHT: dict[str, Any] = {
    **{**SHARED, "change": never_wrong, "norm_before_residual": True},
    "changes": {"attention_bias": True, "num_key_value_heads": HEADS},
}
"""Arguments of a model and a head that is never wrong."""
