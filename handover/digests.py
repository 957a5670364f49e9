"""Digests of files: what proves that a file's content is the recorded one.

``sha256:`` is the ordinary digest. ``crc32-1m:`` is for weights, which are many and large: the CRC-32 of each MiB of
the file, and SHA-256 over the list of them. It takes a fraction of the time (measured: CRC-32 60 GB/s with isal, 6 GB/s
with zlib alone, SHA-256 1.9 GB/s on one processor). Both tell damage. Neither tells who wrote a file, as
``handover.signatures`` do: whoever can write the file can write its manifest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

try:
    from isal.isal_zlib import crc32
    from isal.isal_zlib import crc32_combine as _combine
except ImportError:  # a container that lacks it: the same sums, later
    from zlib import crc32

    _combine = None  # type: ignore[assignment]

__all__ = [
    "BLOCK_BYTES",
    "CRC32_BLOCKS",
    "SHA256",
    "BlockSums",
    "Digest",
    "SummedRange",
    "crc32",
    "crc32_combine",
    "file_digest",
    "joined_digest",
    "new_digest",
]

crc32_combine: Callable[[int, int, int], int] | None = _combine
"""The CRC-32 of two runs of bytes, one behind the other, from those of both and the second one's bytes."""
SHA256, CRC32_BLOCKS = "sha256", "crc32-1m"
BLOCK_BYTES = 1 << 20
"""Bytes of a file that one CRC-32 stands for."""
_CHUNK_BYTES = 8 << 20


class Digest(Protocol):
    """A digest that grows with the content."""

    def update(self, content: memoryview | bytes, /) -> None:
        """Go on with the next bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all so far."""


class BlockSums:
    """SHA-256 over the CRC-32 of each MiB, as four bytes each, the most significant first.

    Args:
        offset: of the first byte in its file; blocks end where the file's do, so that the first may be a part of one.
    """

    def __init__(self, offset: int = 0) -> None:
        self._sums = bytearray()
        self._sum = 0
        self._size_bytes = offset % BLOCK_BYTES
        self._has_begun = False

    def update(self, content: memoryview | bytes) -> None:
        """Go on with the next bytes."""
        view = memoryview(content)
        while len(view):
            piece = view[: BLOCK_BYTES - self._size_bytes]
            self._sum = crc32(piece, self._sum)
            self._size_bytes += len(piece)
            self._has_begun = self._size_bytes < BLOCK_BYTES
            view = view[len(piece) :]
            if not self._has_begun:
                self._sums += self._sum.to_bytes(4, "big")
                self._sum = self._size_bytes = 0

    def sums(self) -> bytes:
        """Return the CRC-32 of each block so far, the last one as far as it goes."""
        return bytes(self._sums) + (self._sum.to_bytes(4, "big") if self._has_begun else b"")

    def hexdigest(self) -> str:
        """Return the digest of all so far."""
        return hashlib.sha256(self.sums()).hexdigest()


def new_digest(algorithm: str) -> Digest:
    """Begin a digest.

    Raises:
        ValueError: the algorithm is not known.
    """
    if algorithm == CRC32_BLOCKS:
        return BlockSums()
    if algorithm == SHA256:
        return hashlib.sha256()
    raise ValueError(f"no digest is called {algorithm!r}")


def file_digest(path: Path, like: str = SHA256) -> str:
    """Digest a file's content.

    Args:
        path: of the file.
        like: name of the algorithm, or a digest of that algorithm to compare with.

    Returns:
        ``<algorithm>:<hex>``; the empty string for an algorithm that is not known, which equals no digest.
    """
    algorithm = like.partition(":")[0]
    try:
        digest = new_digest(algorithm)
    except ValueError:
        return ""
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return f"{algorithm}:{digest.hexdigest()}"


@dataclass(frozen=True)
class SummedRange:
    """Bytes of a file whose checksums are known.

    Attributes:
        offset, size_bytes: of the range in the file.
        sums: CRC-32 of each of the file's blocks, as far as the range reaches, as ``BlockSums.sums`` gives them.
    """

    offset: int
    size_bytes: int
    sums: bytes

    def blocks(self, file_bytes: int) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield of each block of a file of that size: its number, first byte and end of what is known, and the sum."""
        end = min(self.offset + self.size_bytes, file_bytes)
        for number, start in enumerate(range(0, len(self.sums), 4), self.offset // BLOCK_BYTES):
            low, high = max(number * BLOCK_BYTES, self.offset), min((number + 1) * BLOCK_BYTES, end)
            yield number, low, high, self.sums[start : start + 4]


def joined_digest(path: Path, ranges: Iterable[SummedRange]) -> str:
    """Digest a file as ``file_digest`` does; only blocks that no ranges cover are read.

    Returns:
        ``crc32-1m:<hex>``
    """
    total = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        file_bytes = os.fstat(stream.fileno()).st_size
        known: dict[int, bytes] = {}
        edges: dict[int, dict[int, tuple[int, bytes]]] = {}
        for one in ranges:
            for number, low, high, known_sum in one.blocks(file_bytes):
                if high - low == min(BLOCK_BYTES, file_bytes - number * BLOCK_BYTES):
                    known[number] = known_sum
                elif low < high:
                    edges.setdefault(number, {})[low] = high, known_sum
        for number in range(-(-file_bytes // BLOCK_BYTES)):
            total.update(
                known.get(number)
                or _put_together(edges.get(number, {}), number, file_bytes)
                or _block_sum(stream.fileno(), number)
            )
    return f"{CRC32_BLOCKS}:{total.hexdigest()}"


def _put_together(edges: Mapping[int, tuple[int, bytes]], number: int, file_bytes: int) -> bytes:
    """Return a block's CRC-32 from those of its parts, by their first byte: end and CRC-32; empty: one is missing."""
    end, value = number * BLOCK_BYTES, 0
    while end in edges and crc32_combine is not None:
        start, (end, following) = end, edges[end]
        value = crc32_combine(value, int.from_bytes(following, "big"), end - start)
    return value.to_bytes(4, "big") if end == min((number + 1) * BLOCK_BYTES, file_bytes) else b""


def _block_sum(descriptor: int, number: int) -> bytes:
    return crc32(os.pread(descriptor, BLOCK_BYTES, number * BLOCK_BYTES)).to_bytes(4, "big")
