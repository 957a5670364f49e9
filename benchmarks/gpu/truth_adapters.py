"""LoRA adapters of made-up models, for benchmarks.gpu.truth: transformers' models have them merged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.described import read_directory
from models.peft import DIRECTORY

from .adapters import merged, write_adapter
from .truth_answers import Oracle
from .truth_requests import Ask

ADAPTED = ("llama", "qwen3", "gemma2", "phi3", "qwen3_moe", "deepseek_v3", "falcon_h1", "qwen3_5")
"""Families that have some: plain and fused matrices, norms, experts beside, latent attention, states."""
PLACES = 2
"""On the device at once: the third one waits for the place of another."""
_RANKS = (4, 16, 40)
_NAMES = ("", *(f"a{number}" for number in range(len(_RANKS))))


def write_adapters(directory: Path) -> None:
    """Write adapters of several ranks for all linear layers of a served directory that may have one."""
    decoder = read_directory(directory, ValueError).decoder
    for name, (number, rank) in zip(_NAMES[1:], enumerate(_RANKS), strict=True):
        write_adapter(directory / DIRECTORY / name, decoder, rank, number, torch.float32)


def oracles_of(model: Any, directory: Path, device: str) -> dict[str, Oracle]:
    """Return transformers' model with each adapter of a directory merged, by name; "": without any."""
    return {name: Oracle(merged(model, directory, name) if name else model, device) for name in _NAMES}


def with_adapters(asks: list[Ask], wave: int) -> list[Ask]:
    """Let requests name adapters by turns; half of them name another one in each wave, for the same prompt."""
    turns = (place + place // 4 + wave * ((place + place // 16) % 2) for place in range(len(asks)))
    return [_naming(ask, _NAMES[turn % len(_NAMES)]) for ask, turn in zip(asks, turns, strict=True)]


def _naming(ask: Ask, name: str) -> Ask:
    named = {"lora_name": np.array([[name.encode()]], object)} if name else {}
    return replace(ask, adapter=name, tensors=ask.tensors | named)
