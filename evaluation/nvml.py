"""NVIDIA's management library through ctypes: how busy each GPU is and how much of its memory is used."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_LIBRARY = "libnvidia-ml.so.1"


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t: unlike the first version's, its ``used`` leaves out what the driver keeps for itself."""

    _fields_ = (
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    )


_MEMORY_VERSION = ctypes.sizeof(_Memory) | 2 << 24


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
    """An open library.

    Args:
        library: with ``nvmlInit_v2`` already called.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        count = ctypes.c_uint()
        self._handles: list[ctypes.c_void_p] = []
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
            for index in range(count.value):
                handle = ctypes.c_void_p()
                if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
                    self._handles.append(handle)

    @classmethod
    def open(cls) -> Nvml | None:
        """Open the library; None where there is no driver or no GPU."""
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return None
        return cls(library) if library.nvmlInit_v2() == 0 else None

    def read(self) -> list[GpuReading]:
        """Read every GPU that answers."""
        readings = []
        for handle in self._handles:
            share, memory = _Utilisation(), _Memory(version=_MEMORY_VERSION)
            if (
                self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(share)) == 0
                and self._library.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)) == 0
            ):
                readings.append(GpuReading(float(share.gpu), int(memory.used)))
        return readings

    def close(self) -> None:
        """Close the library."""
        self._library.nvmlShutdown()
