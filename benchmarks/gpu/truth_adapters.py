"""LoRA adapters of made-up models, for benchmarks.gpu.truth: what they add to transformers' linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from backends.fastertransformer.engine.engine import Engine
from models.described import read_directory
from models.peft import DIRECTORY, PREFIX, WEIGHTS_FILE, name_in_class

from .adapters import write_adapter
from .truth_answers import Oracle
from .truth_requests import Ask

_RANKS = (4, 16, 40)
_NAMES = ("", *(f"a{number}" for number in range(len(_RANKS))))
_CHANGED = 3  # requests, before each of which adapters change


def _others_of(directory: Path) -> Path:
    """Return the folder beside a served directory with adapters of the same names and ranks, of other numbers."""
    return directory.with_name(f"{directory.name}_others")


def write_adapters(directory: Path) -> None:
    """Write adapters of several ranks for all linear layers of a served directory that may have one, and others."""
    decoder = read_directory(directory, ValueError).decoder
    for seed, folder in enumerate((directory / DIRECTORY, _others_of(directory))):
        for name, (number, rank) in zip(_NAMES[1:], enumerate(_RANKS), strict=True):
            write_adapter(folder / name, decoder, rank, number + 100 * seed, torch.float32, has_head=number > 0)


@dataclass
class Adapted:
    """Transformers' model, whose linear layers add what an adapter does.

    Attributes:
        chosen: the adapter's directory; None: none.
    """

    chosen: Path | None = None
    _sums: dict[Path, dict[str, tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def hook(self, model: Any, directories: list[Path], dtype: torch.dtype, device: str) -> ExitStack:
        """Let a model's layers add them, until what is returned is closed."""
        for directory in directories:
            pairs = load_file(directory / WEIGHTS_FILE)
            names = [key.removeprefix(PREFIX).removesuffix(".lora_A.weight") for key in pairs if ".lora_A." in key]
            own = self._sums[directory] = {}
            for name in names:
                down, up = (pairs[f"{PREFIX}{name}.lora_{side}.weight"].to(device, dtype) for side in "AB")
                own[name] = down, up
        stack = ExitStack()
        for name in {name for each in self._sums.values() for name in each}:
            module = model.get_submodule(name_in_class(name))
            if type(module) is torch.nn.Linear:
                stack.callback(module.register_forward_hook(partial(self._add, name)).remove)
                continue
            weight = module.weight.data  # a router's, whose results are not its product alone
            stack.callback(module.register_forward_pre_hook(partial(self._change, name, weight)).remove)
            stack.callback(setattr, module.weight, "data", weight)
        return stack

    def _change(self, name: str, weight: Tensor, module: Any, _: Any) -> None:
        own = self._sums[self.chosen].get(name) if self.chosen else None
        module.weight.data = (weight.float() + own[1].float() @ own[0].float()).to(weight.dtype) if own else weight

    def _add(self, name: str, _: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if self.chosen is None or name not in self._sums[self.chosen]:
            return None
        down, up = self._sums[self.chosen][name]
        return output + (inputs[0] @ down.T) @ up.T


class _AdaptedOracle(Oracle):
    def __init__(self, model: Any, device: str, adapted: Adapted, chosen: Path | None) -> None:
        super().__init__(model, device)
        self._adapted, self._chosen = adapted, chosen

    def score(self, prompt: list[int], tokens: list[int]) -> Tensor:
        self._adapted.chosen = self._chosen
        return super().score(prompt, tokens)


@contextmanager
def oracles_of(model: Any, directory: Path, device: str, dtype: torch.dtype) -> Iterator[dict[str, Oracle]]:
    """Return transformers' model with each adapter that Ask.adapter may name; "": without any."""
    adapted, keys = Adapted(), {"": None, **{_key(path): path for path in _paths(directory)}}
    with adapted.hook(model, [path for path in keys.values() if path], dtype, device):
        yield {key: _AdaptedOracle(model, device, adapted, path) for key, path in keys.items()}


def _paths(directory: Path) -> list[Path]:
    folders = directory / DIRECTORY, _others_of(directory)
    return [folder / name for folder in folders for name in _NAMES[1:]]


def _key(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def with_adapters(asks: list[Ask], wave: int, is_steady: bool = True) -> list[Ask]:
    """Let requests name adapters by turns; half of them name another one in each wave, for the same prompt.

    Where adapters change, requests with a grammar name none: one that is unloaded while the grammar is compiled is
    refused, as those are that were not sent yet.
    """
    turns = (place + place // 4 + wave * ((place + place // 16) % 2) for place in range(len(asks)))
    named = [(ask, _NAMES[turn % len(_NAMES)]) for ask, turn in zip(asks, turns, strict=True)]
    return [_naming(ask, name if is_steady or ask.kind != "grammar" else "") for ask, name in named]


def _naming(ask: Ask, name: str) -> Ask:
    named = {"lora_name": np.array([[name.encode()]], object)} if name else {}
    return replace(ask, adapter=f"{DIRECTORY}/{name}" if name else "", tensors=ask.tensors | named)


@dataclass
class Changes:
    """Which adapters an engine has under which names, while they change.

    Args:
        engine: that has them.
        directory: that is served.
    """

    engine: Engine
    directory: Path
    _sent: int = 0
    _others: set[str] = field(default_factory=set)

    def before(self, asks: list[Ask], place: int) -> None:
        """Before a request is sent, unload an adapter and load another one of its name; note which one it asks for."""
        name = asks[place].adapter.rpartition("/")[2]
        self._sent += 1
        if self._sent % _CHANGED == 0:
            changed = name or _NAMES[-1]  # rows that have it are waiting, or run
            self.engine.unload_adapter(changed)
            self._others ^= {changed}
            self.engine.load_adapter(changed, self._path(changed))
        if name:
            asks[place] = replace(asks[place], adapter=_key(self._path(name)))

    def _path(self, name: str) -> Path:
        return (_others_of(self.directory) if name in self._others else self.directory / DIRECTORY) / name
