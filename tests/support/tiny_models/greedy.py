"""Greedy generation by one of transformers' decoders, a whole forward pass for every token."""

from __future__ import annotations

from typing import Any

import torch

NEVER = 4000
"""A token that no tiny vocabulary has."""


@torch.no_grad()
def greedy(model: Any, line: list[int], count: int, end_id: int = NEVER, window: int = 0) -> list[int]:
    """Append tokens up to end_id; with a window each token sees the last ones only, itself included, in every layer."""
    line = list(line)
    for _ in range(count):
        told = {"attention_mask": _windowed(len(line), window)} if window else {}
        line.append(int(model(input_ids=torch.tensor([line]), **told).logits[0, -1].argmax()))
        if line[-1] == end_id:
            break
    return line


@torch.no_grad()
def argmaxes(model: Any, line: list[int], tokens: list[int]) -> list[int]:
    """Give the token that the model chooses for the place of each of ``tokens``, by one forward pass.

    They are greedy tokens of the line if they are the same.
    """
    chosen: list[int] = (
        model(input_ids=torch.tensor([[*line, *tokens]])).logits[0, len(line) - 1 : -1].argmax(-1).tolist()
    )
    return chosen


def _windowed(length: int, window: int) -> torch.Tensor:
    place = torch.arange(length)
    hidden = (place[None] > place[:, None]) | (place[None] <= place[:, None] - window)
    return torch.zeros(1, 1, length, length).masked_fill(hidden, torch.finfo(torch.float32).min)
