"""Compile sources in C for this processor, once: the library is kept under the digest of all that decides about it.

The user's cache directory keeps it (``$XDG_CACHE_HOME/slipway``, ``~/.cache/slipway``).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_log = logging.getLogger(__name__)
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp-simd", "-shared", "-fPIC")
_COMPILERS = ("gcc", "cc")
_TIMEOUT_S = 120.0


class NoLibraryError(Exception):
    """Why there is no library here."""


def compiled(name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Return the compiled library.

    Args:
        name: what its file's begins with.
        sources: in C.
        flags: for the compiler, beside those that optimize for this processor.

    Raises:
        NoLibraryError: there is no compiler, or it fails.
        OSError: it cannot be asked.
        SubprocessError: it does not answer.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if not compiler:
        raise NoLibraryError("there is no C compiler (Debian, Ubuntu: apt-get install gcc libc6-dev)")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT_S).stdout
    command = [compiler, *_FLAGS, *flags, *map(str, sources)]
    parts = (*(source.read_bytes() for source in sources), " ".join((*_FLAGS, *flags)).encode(), version, *_processor())
    file = f"{name}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:24]}.so"
    for directory in _directories():
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (library := directory / file).exists():
                _compile(command, library)
        except PermissionError:
            continue
        except OSError as error:
            _log.info("%s keeps no compiled kernels: %s", directory, error)
            continue
        return library
    raise NoLibraryError("no directory takes the compiled library")


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


def _compile(command: Sequence[str], library: Path) -> None:
    """Compile to a file beside the library, and rename that: another process may do the same.

    Raises:
        NoLibraryError: the compiler fails.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as place:
        new = Path(place) / library.name
        ended = subprocess.run([*command, "-o", str(new)], capture_output=True, timeout=_TIMEOUT_S)
        if ended.returncode:
            said = ended.stderr.decode(errors="replace")  # its quotes are no ASCII, which is Triton's stub's encoding
            raise NoLibraryError(f"{command[0]} does not compile the kernels: {said.strip()[:300]}")
        new.rename(library)
