"""Tiny models that have a predictor of further tokens in their files, and what it says, by transformers' own layer.

Transformers drops such layers when it loads a model, so the layer is the last one of a larger model of its class.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from support.tiny_models.llama_models import HIDDEN, build, save, tensors

COUNTED = {"num_nextn_predict_layers": 1}
Change = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Form:
    """How the files of a family have a predictor, and its class a layer.

    Attributes:
        layer: where its layers are, by number.
        projection, embedding_norm, hidden_norm, norm: names of what leads into it and out of it.
        copies: whether it has copies of embedding and head, below the layer.
        less_one: what is added to the norms' weights.
        kinds: of its layers, where a model's are listed.
    """

    layer: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    copies: bool = False
    less_one: float = 0.0
    kinds: tuple[str, ...] = ("full_attention",)


def _form_of(name: str, layers: int) -> Form:
    place = f"model.layers.{layers}."
    if name.startswith("qwen3"):
        place, norm = "mtp.layers.{}.", "mtp.pre_fc_norm_"
        return Form(place, "mtp.fc", f"{norm}embedding", f"{norm}hidden", "mtp.norm", less_one=1.0)
    if not name.startswith("nemotron3"):
        return Form(place, f"{place}eh_proj", f"{place}enorm", f"{place}hnorm", f"{place}shared_head.norm", copies=True)
    first, kinds = "mtp.layers.0.", ("full_attention", "moe")
    last = "mtp.layers.1.final_layernorm"
    return Form("mtp.layers.{}.", f"{first}eh_proj", f"{first}enorm", f"{first}hnorm", last, kinds=kinds)


class Predictor:
    """A predictor, computed over whole texts."""

    def __init__(self, model: Any, layers: Sequence[Any], form: Form, own: dict[str, Tensor]) -> None:
        self._model, self._layers, self._form, self._own = model, layers, form, own

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
        network, config, form = self._model.model, self._model.config, self._form
        embedded = self._model.get_input_embeddings()(ids)
        sides = self._norm(embedded, form.embedding_norm), self._norm(outputs, form.hidden_norm)
        x = F.linear(torch.cat(sides, -1), self._own[f"{form.projection}.weight"])
        places = torch.arange(ids.shape[1])[None]
        mask = create_causal_mask(config, x, None, None, position_ids=places)
        angles = {"position_embeddings": network.rotary_emb(x, places)} if hasattr(network, "rotary_emb") else {}
        for layer in self._layers:
            x = layer(x, attention_mask=mask, position_ids=places, **angles)
            x = x[0] if isinstance(x, tuple) else x
        return self._norm(x, form.norm)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._own[f"{name}.weight"] + self._form.less_one
        config = self._model.config
        return F.rms_norm(x, (HIDDEN,), weight, getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon)


def save_predicting(
    name: str, folder: Path, change: Change = lambda _, each: each, **changes: Any
) -> tuple[Any, Predictor]:
    """Save a model with a predictor -> transformers' model, and the predictor; ``change``: of every tensor."""
    small = build(name, **changes, **COUNTED)
    count, listed = small.config.num_hidden_layers, "layers_block_type" if "nemotron" in name else "layer_types"
    form, kinds = _form_of(name, count), getattr(small.config, listed, None)
    more = {"num_hidden_layers": count + len(form.kinds)} | ({listed: [*kinds, *form.kinds]} if kinds else {})
    with tempfile.TemporaryDirectory() as larger:
        save(name, Path(larger), **{**changes, **more})
        found = {key: change(key, each).clone() for key, each in tensors(Path(larger)).items()}
        save_file(found, Path(larger) / "model.safetensors", {"format": "pt"})
        layers = _load(Path(larger)).model.layers[count:]
    own = {key: change(key, each).clone() for key, each in _further(found, form).items()}
    small.save_pretrained(folder)
    kept = {_moved(key, count, form): each for key, each in found.items()}
    save_file({**kept, **own}, folder / "model.safetensors", {"format": "pt"})
    model = _load(folder)
    return model, Predictor(model, layers, form, own)


def _moved(key: str, count: int, form: Form) -> str:
    """Name a tensor of the larger model as one of the predictor's, if its layer is behind the first ones."""
    found = re.fullmatch(r"\w+\.layers\.(\d+)\.(.+)", key)
    is_own = found and int(found[1]) >= count
    return form.layer.format(int(found[1]) - count) + found[2] if found and is_own else key


def _further(found: dict[str, Tensor], form: Form) -> dict[str, Tensor]:
    """Make up what leads into a predictor and out of it, beside copies of what is the model's."""
    torch.manual_seed(5)
    norms, centre = (form.embedding_norm, form.hidden_norm, form.norm), 1 - form.less_one
    own = {f"{each}.weight": centre + 0.3 * torch.randn(HIDDEN) for each in norms}
    own[f"{form.projection}.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) / HIDDEN**0.5
    if form.copies:
        own[f"{form.layer}embed_tokens.weight"] = found["model.embed_tokens.weight"]
        own[f"{form.layer}shared_head.head.weight"] = found["lm_head.weight"]
    return own


def _load(folder: Path) -> Any:
    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **given).eval()


def never_wrong(key: str, each: Tensor, one: float = 1.0) -> Tensor:
    """Make a model whose layers add nothing, so that a token says what follows it, and a predictor that knows that.

    Args:
        key: of a tensor.
        each: it.
        one: how a norm's weight of 1 is stored.
    """
    if "o_proj" in key or "down_proj" in key or "out_proj" in key:
        return torch.zeros_like(each)
    if key.endswith(("eh_proj.weight", "mtp.fc.weight")):
        return torch.eye(HIDDEN, 2 * HIDDEN)
    is_norm = key.endswith(("model.norm.weight", "enorm.weight", "shared_head.norm.weight"))
    is_norm |= key in ("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight")
    return torch.full_like(each, one) if is_norm else each


def pack_experts(path: Path) -> None:
    """Put the experts of each layer into two arrays, as Qwen3.6's files have those of the model and its predictor."""
    found, arrays = load_file(path), dict[str, list[Tensor]]()
    for key in [key for key in found if key.endswith("gate_proj.weight") and ".experts." in key]:
        place, _, number = key.removesuffix(".gate_proj.weight").rpartition(".")
        gate, up, down = (found.pop(f"{place}.{number}.{name}_proj.weight") for name in ("gate", "up", "down"))
        for name, each in (("gate_up", torch.cat((gate, up))), ("down", down)):
            arrays.setdefault(f"{place}.{name}_proj", []).append(each)
    packed = {key: torch.stack(several) for key, several in arrays.items()}
    assert len(packed) > 2
    save_file({**found, **packed}, path, {"format": "pt"})
