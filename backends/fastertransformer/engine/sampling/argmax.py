"""The choice that needs no sampling: the likeliest token, and a mark where there is none."""

import torch
from torch import Tensor

LOST = -1  # in place of a token


def likeliest(logits: Tensor) -> Tensor:
    """Give each row's likeliest token, [B, V] -> [B]; LOST where its numbers are infinite or NaN."""
    # Any column tells: each sums over all hidden numbers.
    return torch.where(logits[:, 0].isfinite(), logits.argmax(dim=-1), LOST)
