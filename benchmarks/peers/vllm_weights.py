"""Random weights for vLLM's networks, in benchmarks.peers.compare. Its workers import this module by name."""

from __future__ import annotations

from typing import Any


def make_weights_random(model: Any) -> bool:
    """Give a network the random weights that the drop-in engine makes up too: vLLM's own dummies are nearly zero.

    Matrices that are FP8 by now keep one scale for all of their numbers.
    """
    import torch

    spread = 64.0  # of numbers in FP8, whose largest is 448
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("ln_" in name or "norm" in name) and name.endswith("weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            elif "scale" in name:
                parameter.fill_(0.02 / spread)
            elif parameter.dtype == torch.float8_e4m3fn:
                numbers = torch.randn(parameter.shape, device=parameter.device, dtype=torch.bfloat16)
                parameter.copy_((numbers * spread).clamp_(-448, 448))
            elif parameter.is_floating_point():
                parameter.normal_(0, 0.02)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return True
