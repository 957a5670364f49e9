"""Random weights for vLLM's networks, in benchmarks.peers.compare. Its workers import this module by name."""

from __future__ import annotations

from typing import Any


def make_weights_random(model: Any) -> bool:
    """Give a network the random weights that the drop-in engine makes up too: vLLM's own dummies are nearly zero."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("ln_" in name or "norm" in name) and name.endswith("weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0, 0.02)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return True
