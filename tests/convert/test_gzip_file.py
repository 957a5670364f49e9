"""Gzipped files read from any place, against what was compressed."""

from __future__ import annotations

import gzip
import random
import zlib
from pathlib import Path

import pytest

from export_scripts.checkpoints.files import gzip_file
from export_scripts.checkpoints.files.gzip_file import GzipReader, Mark


@pytest.fixture
def content(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Two megabytes, half of which compress, and a mark for each 100 KB of them."""
    monkeypatch.setattr(gzip_file, "_STEP_BYTES", 100_000)
    monkeypatch.setattr(gzip_file, "_SKIP_BYTES", 30_000)
    rng = random.Random(0)
    return b"".join(rng.randbytes(1000) + bytes(1000) for _ in range(1000))


def read(reader: GzipReader, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    reader.seek(offset)
    return bytes(buffer[: reader.readinto(buffer)])


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("padding", [0, 100_000])
def test_every_place_is_read_as_it_was_written(content: bytes, members: int, padding: int, tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    size = -(-len(content) // members)
    parts = [content[start : start + size] for start in range(0, len(content), size)]
    path.write_bytes(b"".join(map(gzip.compress, parts)) + bytes(padding))
    marks: list[Mark] = []
    rng = random.Random(1)
    for _ in range(2):  # the second reader begins at the first one's marks
        with GzipReader(path, marks) as reader:
            for _ in range(60):
                offset, count = rng.randrange(len(content) + 10), rng.randrange(200_000)
                assert read(reader, offset, count) == content[offset : offset + count]
            assert read(reader, len(content) - 5, 10) == content[-5:]
    assert 15 <= len(marks) <= 20
    with GzipReader(path, marks) as reader:
        read(reader, 1_950_000, 1)
        assert reader._file.tell() > path.stat().st_size * 0.8  # type: ignore[attr-defined]
        assert reader._offset == 1_950_001


def test_a_cut_and_a_flipped_bit_are_found(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    compressed = gzip.compress(content)
    path.write_bytes(compressed[:-9])
    with GzipReader(path, []) as reader, pytest.raises(EOFError, match="in the middle"):
        read(reader, len(content) - 1, 10)
    path.write_bytes(compressed[:-6] + bytes([compressed[-6] ^ 1]) + compressed[-5:])
    with GzipReader(path, []) as reader, pytest.raises(zlib.error, match="incorrect data check"):
        read(reader, 0, len(content) + 1)
