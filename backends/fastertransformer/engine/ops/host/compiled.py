"""The kernels in C, compiled for this processor where they were not yet.

Their threads are those of torch: OpenMP's own function that runs one on each thread is looked up in the library that
torch has loaded.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import subprocess
from functools import lru_cache
from pathlib import Path

import torch  # noqa: F401 (loads the library whose threads are used)

from ft_format.c_library import NoLibraryError, compiled

from ...cache.page_allocator import PAGE

_log = logging.getLogger(__name__)
_SOURCES = tuple(Path(__file__).with_name(name) for name in ("products.c", "attention.c", "layers.c"))
_FLAGS = ("-ffp-contract=fast", f"-DPAGE={PAGE}")
_POINTER, _INT, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_double
_MULTIPLY = (
    *(_POINTER, _INT, _POINTER, _POINTER, _POINTER, _LONG),
    *(_POINTER, _POINTER, _DOUBLE, _INT, _INT, _POINTER, _INT),
)
_ATTEND = (
    *(_POINTER, _INT, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG),
    *(_POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER),
)
_RUN_LAYERS = (
    *(_POINTER, _INT, _INT, _POINTER, _POINTER, _LONG),
    *(_POINTER, _LONG, _LONG, _LONG, _LONG, _INT, _POINTER),
)


class HostKernels:
    """The library of the sources.

    Attributes:
        width: outputs of a panel.
        multiplies_pairs: whether bf16 is multiplied in pairs.
        multiplies_quads: whether bytes are multiplied by fours.
        run: OpenMP's function that runs another one on each thread.
        multiply: see products.c.
        attend: see attention.c.
        run_layers: see layers.c.
    """

    def __init__(self, library: Path) -> None:
        self.run = ctypes.cast(_openmp().GOMP_parallel, _POINTER)
        found = ctypes.CDLL(str(library))
        self.width = int(found.panel_width())
        self.multiplies_pairs = bool(found.multiplies_pairs())
        self.multiplies_quads = bool(found.multiplies_quads())
        self.multiply = found.multiply
        self.multiply.argtypes, self.multiply.restype = _MULTIPLY, _INT
        self.attend = found.attend
        self.attend.argtypes, self.attend.restype = _ATTEND, _INT
        self.run_layers = found.run_layers
        self.run_layers.argtypes, self.run_layers.restype = _RUN_LAYERS, _INT


@lru_cache
def host_kernels() -> HostKernels | None:
    """Compile or find the kernels; None: this processor or machine has none, as the log says."""
    try:
        kernels = HostKernels(_library())
    except (NoLibraryError, OSError, AttributeError, subprocess.SubprocessError) as error:
        _log.warning("products on the CPU are torch's, which reads a matrix slower for few rows: %s", error)
        return None
    _log.info("products on the CPU are those of %s", _SOURCES[0].name)
    return kernels


def _library() -> Path:
    """Return the compiled library.

    Raises:
        NoLibraryError: there is no compiler, or it fails.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise NoLibraryError(f"{_SOURCES[0].name} is for x86-64, and this is {platform.machine()}")
    return compiled("products", _SOURCES, _FLAGS)


def _openmp() -> ctypes.CDLL:
    """Return the OpenMP library that torch computes with."""
    lines = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()
    names = {line.split(maxsplit=5)[-1] for line in lines if ".so" in line}
    found = sorted(name for name in names if Path(name).name.startswith(("libgomp", "libomp", "libiomp")))
    if not found:
        raise NoLibraryError("torch computes without OpenMP")
    own = [name for name in found if "torch" in name]
    return ctypes.CDLL((own or found)[0])
