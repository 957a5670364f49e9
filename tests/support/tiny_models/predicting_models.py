"""Tiny models that have a predictor of further tokens in their files, and what it says, by transformers' own layer.

Transformers drops such layers when it loads a model, so the layer is the last one of a larger model of its class.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from support.tiny_models.llama_models import HIDDEN, build, save, tensors

COUNTED = {"num_nextn_predict_layers": 1}
Change = Callable[[str, Tensor], Tensor]


class Predictor:
    """A predictor, computed over whole texts."""

    def __init__(self, model: Any, layer: Any, own: dict[str, Tensor]) -> None:
        self._model, self._layer, self._own = model, layer, own

    @torch.no_grad()
    def drafts(self, line: list[int], count: int) -> list[int]:
        """Return the tokens that it says behind a text, one after the other."""
        outputs = self._model.model(input_ids=torch.tensor([line[:-1]])).last_hidden_state
        said = list[int]()
        for _ in range(count):
            given = self._run(torch.tensor([[*line[1:], *said]]), outputs)[:, -1:]
            said.append(int(self._model.lm_head(given)[0, -1].argmax()))
            outputs = torch.cat((outputs, given), 1)
        return said

    def _run(self, ids: Tensor, outputs: Tensor) -> Tensor:
        network, config = self._model.model, self._model.config
        sides = self._norm(network.embed_tokens(ids), "enorm"), self._norm(outputs, "hnorm")
        x = F.linear(torch.cat(sides, -1), self._own["eh_proj.weight"])
        places = torch.arange(ids.shape[1])[None]
        mask = create_causal_mask(config, x, None, None, position_ids=places)
        angles = network.rotary_emb(x, places)
        x = self._layer(x, attention_mask=mask, position_ids=places, position_embeddings=angles)
        return self._norm(x[0] if isinstance(x, tuple) else x, "shared_head.norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), self._own[f"{name}.weight"], self._model.config.rms_norm_eps)


def save_predicting(
    name: str, folder: Path, change: Change = lambda _, each: each, **changes: Any
) -> tuple[Any, Predictor]:
    """Save a model with a predictor -> transformers' model, and the predictor; ``change``: of every tensor."""
    small = build(name, **changes, **COUNTED)
    count = small.config.num_hidden_layers
    prefix = f"model.layers.{count}."
    with tempfile.TemporaryDirectory() as larger:
        save(name, Path(larger), **{**changes, "num_hidden_layers": count + 1})
        found = tensors(Path(larger))
        found = {key: change(key, each).clone() for key, each in {**found, **_further(found, prefix)}.items()}
        save_file(found, Path(larger) / "model.safetensors", {"format": "pt"})
        layer = _load(Path(larger)).model.layers[-1]
    small.save_pretrained(folder)
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    own = {key.removeprefix(prefix): each for key, each in found.items() if key.startswith(prefix)}
    model = _load(folder)
    return model, Predictor(model, layer, own)


def _further(found: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Make up what leads into a predictor and out of it, beside copies of what is the model's."""
    torch.manual_seed(5)
    own = {f"{each}.weight": 1 + 0.3 * torch.randn(HIDDEN) for each in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) / HIDDEN**0.5
    own["embed_tokens.weight"], own["shared_head.head.weight"] = (
        found["model.embed_tokens.weight"],
        found["lm_head.weight"],
    )
    return {f"{prefix}{key}": each for key, each in own.items()}


def _load(folder: Path) -> Any:
    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **given).eval()


def never_wrong(key: str, each: Tensor) -> Tensor:
    """Make a model whose layers add nothing, so that a token says what follows it, and a predictor that knows that."""
    if "o_proj" in key or "down_proj" in key:
        return torch.zeros_like(each)
    if key.endswith("eh_proj.weight"):
        return torch.eye(HIDDEN, 2 * HIDDEN)
    is_norm = key.endswith(("model.norm.weight", "enorm.weight", "shared_head.norm.weight"))
    return torch.ones_like(each) if is_norm else each
