"""What launches share: programmatic dependent launch, scratch memory, a norm's block, the numbers of a score."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..linear import Blocks, Norm
from ..positions import AttentionSpec
from .elements import LOG2_E

_MOST_NORM_BLOCK = 8192
_UNLIMITED = 1 << 30  # cells: no window
_NUMBERS, _COUNTERS = 4 << 20, 1 << 16  # of scratch memory at first


@lru_cache
def uses_pdl(device: torch.device) -> bool:
    """Return whether a kernel may begin before the one before it has ended: programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def has_fp8(device: torch.device) -> bool:
    """Return whether kernels know FP8 numbers: from compute capability 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def bytes_of(weight: Tensor) -> Tensor:
    """Return a weight as kernels take it: FP8 as bytes where they do not know it; see elements.converted."""
    is_unknown = weight.dtype == torch.float8_e4m3fn and not has_fp8(weight.device)
    return weight.view(torch.uint8) if is_unknown else weight


def scales_of(scales: Tensor | None, blocks: Blocks | None) -> tuple[int, int, int]:
    """Return where the first column is in its block, and how many blocks and columns of one there are; 0: no blocks."""
    return (blocks.first, scales.shape[-1], blocks.width) if blocks and scales is not None else (0, 1, 0)


def is_older(device: torch.device) -> bool:
    """Return whether a GPU has fewer registers for a product than Hopper, whose products read shared memory."""
    return device.type == "cuda" and not uses_pdl(device)


@lru_cache
def has_wide_memory(device: torch.device) -> bool:
    """Return whether a program may have 227 KB of shared memory: of compute capability 9 and 10, or without a GPU."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


class Scratch:
    """Memory that all launches of a stream share, one after another; and the device's number of processors."""

    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 8
        self._numbers = torch.zeros(_NUMBERS, device=device)
        self._counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        self._old: list[Tensor] = []  # CUDA graphs may still use it

    def get(self, counters: int, numbers: int) -> tuple[Tensor, Tensor]:
        """Return fp32 numbers, of any content, and int32 counters, which are 0 and must be 0 again afterwards."""
        if counters > len(self._counters) or numbers > len(self._numbers):
            self._old += [self._numbers, self._counters]
            self._numbers = self._numbers.new_zeros(max(numbers, len(self._numbers)))
            self._counters = self._counters.new_zeros(max(counters, len(self._counters)))
        return self._numbers, self._counters


def scratch_of(device: torch.device) -> Scratch:
    """Return the scratch memory of the current stream: launches in another stream may run at the same time."""
    return _scratch_of(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@lru_cache
def _scratch_of(device: torch.device, stream: int) -> Scratch:
    return Scratch(device)


def norm_block(width: int) -> int:
    """Return how many numbers of a row a norm's program reads at a time."""
    return min(int(triton.next_power_of_2(width)), _MOST_NORM_BLOCK)


def norm_kind(norm: Norm | None) -> str:
    """Return the kernels' name of a norm: rms, layer, or nothing."""
    return ("rms" if norm.is_rms else "layer") if norm else ""


class Scores(NamedTuple):
    """What a kernel needs to compute the scores of a spec; see scores_of.

    Attributes:
        scale: that products are multiplied by, with what ``capped`` or an exponential to base 2 takes.
        cap: of scores to base 2; 0: none.
        reach: how many cells a token sees at most, its own among them.
        in_chunks: whether it sees those of its chunk alone, which has that many; see elements.reach_of.
    """

    scale: float
    cap: float
    reach: int
    in_chunks: bool


def scores_of(spec: AttentionSpec) -> Scores:
    """Return a spec's numbers as the kernels take them."""
    scale, cap = spec.scale * LOG2_E.value, spec.softcap * LOG2_E.value
    if cap:
        scale *= 2 * LOG2_E.value / cap
    return Scores(scale, cap, spec.reach or _UNLIMITED, spec.chunk > 0)
