"""transformers over what matrices of FP8 mean, with their inputs rounded by the scales that lie beside them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from support.tiny_models.quantized_models import save_state

Round = Callable[[Tensor, Tensor], Tensor]
"""Rounds activations by a scale."""


class _EachExpert(nn.Module):
    """Experts one by one, as files and compressed-tensors have them."""

    def __init__(self, linears: list[tuple[nn.Linear, ...]]) -> None:
        super().__init__()
        self._linears = linears

    def forward(self, hidden: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        found = torch.zeros_like(hidden)
        for token, place in torch.ones_like(chosen).nonzero().tolist():
            gate, up, down = self._linears[int(chosen[token, place])]
            x = hidden[token]
            found[token] += counts[token, place] * down(nn.functional.silu(gate(x)) * up(x))
        return found


def model_of(directory: Path, state: dict[str, Tensor], ends: tuple[str, str, Any], rounds: Round | None) -> Any:
    """Load a directory's model; ``rounds`` None: with what its weights mean alone."""
    import transformers

    means = {key: each for key, each in state.items() if not key.endswith("_scale") and not key.endswith("_inv")}
    inputs = {key: state[f"{key}.{ends[1]}"] for key in (name.removesuffix(".weight") for name in means)
              if f"{key}.{ends[1]}" in state}  # fmt: skip
    for key, each in means.items():
        means[key] = (each.float() * state[key + ends[0]] if key + ends[0] in state else each.float()).contiguous()
    with tempfile.TemporaryDirectory() as folder:
        for file in directory.glob("*.json"):
            (Path(folder) / file.name).write_bytes(file.read_bytes())
        save_state(Path(folder), means, None)
        given: Any = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **given).eval()
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in list(modules.items()):
        if name.endswith(".experts"):
            linears = []
            for number in range(module.num_experts):
                names = [f"{name}.{number}.{role}_proj" for role in ("gate", "up", "down")]
                linears.append(tuple(_linear(means[f"{each}.weight"]) for each in names))
                modules |= dict(zip(names, linears[-1], strict=True))
            model.set_submodule(name, _EachExpert(linears))
    for name, scale in inputs.items() if rounds else ():
        modules[name].register_forward_pre_hook(partial(_rounded, rounds, scale))
    return model


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def _rounded(rounds: Round, scale: Tensor, module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return rounds(given[0], scale), *given[1:]
