"""Which bytes files hold, told without reading all of them: what a checkpoint of any size is recognised by.

The digest is over each file's name, size, times and inode, and over samples of its content: its start and end, where
formats keep their headers and directories (safetensors, zip with the checksums of all records, gzip), and blocks evenly
between. Of a tar the same is taken of each member. Some 16 MiB are read of a large checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from stat import S_ISREG
from typing import IO

_MOST_BYTES = 16 << 20
_MOST_FILES = 512
_MOST_MEMBERS = 4096
_LEAST_SAMPLE_BYTES, _MOST_SAMPLE_BYTES = 8 << 10, 512 << 10
_BLOCK_BYTES = 4 << 10
_TAR_BLOCK_BYTES = 512
_LINKED = ".safetensors"
"""End of the names of files that conversions and exports link: that changes their time of change."""


def files_of(path: Path) -> dict[str, Path]:
    """List a file, or all plain files below a directory, by the names that do not change when it is moved."""
    if not path.is_dir():
        return {"": path}
    return {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}


def identify(files: Mapping[str, Path]) -> str:
    """Digest what tells these files from others that were put in their place.

    A file that takes another's place has another inode or time of change, also where its size and time of
    modification were made the same; where a file system does not tell, the samples do.

    Args:
        files: by name relative to their root.

    Returns:
        ``sha256:<hex>``.
    """
    digest = hashlib.sha256()
    names = sorted(files)
    sampled = set(names[:: -(-len(names) // _MOST_FILES) or 1])
    for name in names:
        stat = files[name].stat()
        changed = 0 if name.endswith(_LINKED) else stat.st_ctime_ns
        known = [name, stat.st_size, stat.st_mtime_ns, changed, stat.st_ino]
        digest.update(json.dumps(known).encode())
        if name in sampled and S_ISREG(stat.st_mode):  # a pipe would be waited for
            for content in _samples(files[name], _MOST_BYTES // len(sampled)):
                digest.update(content)
    return f"sha256:{digest.hexdigest()}"


def _samples(path: Path, most_bytes: int) -> Iterator[bytes]:
    """Read what describes a file, and some of the rest; nothing of what cannot be read, which others say better."""
    try:
        with path.open("rb") as stream:
            pieces = list(_pieces(stream, path.stat().st_size))
            share = min(max(most_bytes // len(pieces), _LEAST_SAMPLE_BYTES), _MOST_SAMPLE_BYTES)
            for start, size_bytes in pieces:
                for offset, length in _ranges(size_bytes, share):
                    stream.seek(start + offset)
                    yield stream.read(length)
    except OSError:
        return


def _pieces(stream: IO[bytes], size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of each member of a tar, its header included; of anything else, of the whole file."""
    start = 0
    for _ in range(_MOST_MEMBERS):
        stream.seek(start)
        header = stream.read(_TAR_BLOCK_BYTES)
        if header[257:262] != b"ustar":
            break
        try:
            length = int(tarfile.nti(header[124:136]))  # type: ignore[attr-defined]  # the number's two notations
        except (tarfile.TarError, ValueError):
            break
        if length < 0 or start + length > size_bytes:
            break
        yield start, _TAR_BLOCK_BYTES + length
        start += _TAR_BLOCK_BYTES * (1 + -(-length // _TAR_BLOCK_BYTES))
    if start < size_bytes or not start:
        yield start, size_bytes - start


def _ranges(size_bytes: int, share_bytes: int) -> Iterator[tuple[int, int]]:
    """Choose which ranges of that many bytes to read: half of the share at the end, a quarter at the start."""
    if size_bytes <= share_bytes:
        yield 0, size_bytes
        return
    head, tail = share_bytes // 4, share_bytes // 2
    yield 0, head
    yield size_bytes - tail, tail
    count = share_bytes // 4 // _BLOCK_BYTES
    step = (size_bytes - head - tail) // (count + 1)
    yield from ((head + step * (number + 1), _BLOCK_BYTES) for number in range(count))
