"""Hand-written GPU kernels, in Triton, where a profile has shown a gain; imported where they can run only."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.util import find_spec

import torch

_LEAST_CAPABILITY = (8, 0)  # that Triton compiles for
_log = logging.getLogger(__name__)


@lru_cache
def can_run_on(device: torch.device) -> bool:
    """Say whether the kernels run on a device; try, for Triton needs a C compiler too."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return False
    try:
        from .embedding import embed

        ids = torch.zeros(1, dtype=torch.long, device=device)
        embed(ids, ids, torch.zeros(1, 16, device=device), None)
    except Exception as error:  # whatever the compilers say
        _log.warning("GPU kernels cannot be compiled here, so torch's are used, which are slower: %s", error)
        return False
    return True
