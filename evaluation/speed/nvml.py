"""NVIDIA's management library: how busy each GPU is and how much of its memory is used."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pynvml


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one time.

    Attributes:
        utilisation_percent: share of the last sample period (some ms to 1 s) in which a kernel ran.
        used_bytes: memory in use, by any process, without the driver's own.
    """

    utilisation_percent: float
    used_bytes: int


class Nvml:
    """The initialised library, with a handle for each GPU that gives one."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):
                self._handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))

    @classmethod
    def open(cls) -> Nvml | None:
        """Initialise the library; None where there is no driver or no GPU."""
        try:
            pynvml.nvmlInit()
            return cls()
        except pynvml.NVMLError:
            return None

    def read(self) -> list[GpuReading]:
        """Read every GPU that answers."""
        readings = []
        for handle in self._handles:
            with contextlib.suppress(pynvml.NVMLError):
                share = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
                # The second version's ``used`` leaves out what the driver keeps for itself.
                used_bytes = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used
                readings.append(GpuReading(float(share), int(used_bytes)))
        return readings

    def close(self) -> None:
        """Shut the library down."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
