"""What every floor of the engine knows: arrays of the host, their way to a device, and two sizes that never change."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
MOST_SLOTS = 1024  # so that per-slot tensors have one size and never move
UNBOUNDED = 1 << 31  # window of a slot that keeps every token
_STAGED_BYTES = 1 << 15  # up to this the driver copies asynchronously without pinned memory


def upload(array: Array, device: torch.device) -> Tensor:
    """Copy to a device without waiting for what it is doing."""
    content = torch.from_numpy(array)
    if device.type == "cuda" and array.nbytes > _STAGED_BYTES:
        content = content.pin_memory()
    return content.to(device, non_blocking=True)
