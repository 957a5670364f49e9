"""GPU kernels in Triton, where a profile has shown a gain; imported only where they can run."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch

_LEAST_CAPABILITY = (8, 0)  # that Triton compiles for


def can_run_on(device: torch.device) -> bool:
    """Return whether the kernels run on a device."""
    return _is_made_for(device) and not problem_on(device)


@lru_cache
def problem_on(device: torch.device) -> str:
    """Return why the kernels do not run on a GPU that they are made for; empty: they do, or are not made for it.

    One is compiled to find out, for Triton needs a C compiler and a linker on the host.
    """
    if not _is_made_for(device):
        return ""
    if find_spec("triton") is None:
        return "Python finds no package triton"
    try:
        from .elementwise import embed

        ids = torch.zeros(1, dtype=torch.long, device=device)
        embed(ids, ids, torch.zeros(1, 16, device=device), None)
    except Exception as error:  # whatever the compilers say
        return str(error).strip() or repr(error)
    return ""


def _is_made_for(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
