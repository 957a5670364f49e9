"""Compile the kernels for this processor, once: the library is kept under the digest of all that decides about it.

The user's cache directory keeps it (``$XDG_CACHE_HOME/slipway``, ``~/.cache/slipway``). Its threads are those of torch:
OpenMP's own function that runs one on each thread is looked up in the library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch  # noqa: F401 (loads the library whose threads are used)

from ...cache.page_allocator import PAGE

_log = logging.getLogger(__name__)
_SOURCES = tuple(Path(__file__).with_name(name) for name in ("products.c", "attention.c", "layers.c"))
_FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fopenmp-simd",
    "-shared",
    "-fPIC",
    f"-DPAGE={PAGE}",
)
_COMPILERS = ("gcc", "cc")
_TIMEOUT_S = 120.0
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


class NoKernelsError(Exception):
    """Why the kernels cannot be used here."""


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
    except (NoKernelsError, OSError, AttributeError, subprocess.SubprocessError) as error:
        _log.warning("products on the CPU are torch's, which reads a matrix slower for few rows: %s", error)
        return None
    _log.info("products on the CPU are those of %s", _SOURCES[0].name)
    return kernels


def _library() -> Path:
    """Return the compiled library.

    Raises:
        NoKernelsError: there is no compiler, or it fails.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise NoKernelsError(f"{_SOURCES[0].name} is for x86-64, and this is {platform.machine()}")
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if not compiler:
        raise NoKernelsError("there is no C compiler (Debian, Ubuntu: apt-get install gcc libc6-dev)")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT_S).stdout
    parts = (*(source.read_bytes() for source in _SOURCES), " ".join(_FLAGS).encode(), version, *_processor())
    name = f"products-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:24]}.so"
    for directory in _directories():
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (library := directory / name).exists():
                _compile(compiler, library)
        except PermissionError:
            continue
        except OSError as error:
            _log.info("%s keeps no compiled kernels: %s", directory, error)
            continue
        return library
    raise NoKernelsError("no directory takes the compiled library")


def _directories() -> Iterator[Path]:
    """Name the directories that may keep the library: the user's, or one of this process alone."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        yield Path(home) / "slipway"
    yield Path(tempfile.mkdtemp(prefix="slipway-kernels-"))


def _processor() -> list[bytes]:
    """Return what tells a processor from others that may share the directory."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return sorted({line for line in lines if line.startswith((b"model name", b"flags"))})


def _compile(compiler: str, library: Path) -> None:
    """Compile to a file beside the library, and rename that: another process may do the same.

    Raises:
        NoKernelsError: the compiler fails.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as place:
        new = Path(place) / library.name
        command = [compiler, *_FLAGS, *map(str, _SOURCES), "-o", str(new)]
        ended = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S)
        if ended.returncode:
            said = ended.stderr.decode(errors="replace")  # its quotes are no ASCII, which is Triton's stub's encoding
            raise NoKernelsError(f"{compiler} does not compile the kernels: {said.strip()[:300]}")
        new.rename(library)


def _openmp() -> ctypes.CDLL:
    """Return the OpenMP library that torch computes with."""
    lines = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()
    names = {line.split(maxsplit=5)[-1] for line in lines if ".so" in line}
    found = sorted(name for name in names if Path(name).name.startswith(("libgomp", "libomp", "libiomp")))
    if not found:
        raise NoKernelsError("torch computes without OpenMP")
    own = [name for name in found if "torch" in name]
    return ctypes.CDLL((own or found)[0])
