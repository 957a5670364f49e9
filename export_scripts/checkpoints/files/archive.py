"""Safe access to the files of a checkpoint: a tar archive, a gzipped one, or a directory.

Nothing is unpacked from a plain tar: a member is a range of bytes of the archive and is read or mapped
in place. Only names and types are trusted once they are checked; a member that could write outside of a
directory, or that is not a plain file, condemns the whole archive.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from export_scripts.checkpoints.files.bounded import DESCRIPTION_BYTES, BoundedReader
from export_scripts.checkpoints.files.gzip_file import FileOverAnother, GzipReader, Mark
from export_scripts.checkpoints.files.lfs_pointer import POINTER_BYTES, refuse_pointer
from handover.errors import CheckpointError
from handover.identity import identify

_BLOCK_BYTES = 512
_COPY_BYTES = 8 << 20
# Of the headers of all members: those of some 100,000, which take three times as much in memory.
_HEADER_BYTES = 128 << 20
# What may follow the last member of a gzipped tar: zeros up to a multiple of tar's blocking factor.
_PADDING_BYTES = 1 << 20
_UNSUSPECTED_BYTES = 1 << 30
_LARGEST_GROWTH = 50
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class Extent:
    """A range of bytes of a file.

    Attributes:
        offset: of the first byte.
        size_bytes: length of the range.
    """

    path: Path
    offset: int
    size_bytes: int


class Window(FileOverAnother):
    """A read-only, seekable file over an extent.

    Args:
        extent: of the file, or of what a gzipped file holds.
        file: opened already; by default, the extent's file.
    """

    def __init__(self, extent: Extent, file: Any = None) -> None:
        self._extent = extent
        self._position = 0
        self._file = file or extent.path.open("rb", buffering=0)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position within the extent."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._extent.size_bytes}[whence]
        if base + offset < 0:
            raise OSError(f"seek before the start of {self._extent.path}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read at the position, never beyond the extent."""
        wanted = max(0, min(len(buffer), self._extent.size_bytes - self._position))
        try:
            self._file.seek(self._extent.offset + self._position)
            count = self._file.readinto(memoryview(buffer)[:wanted]) or 0
        except (OSError, EOFError, zlib.error) as error:
            raise CheckpointError(
                f"{self._extent.path} is truncated, damaged or cannot be read ({error})", "copy the checkpoint again"
            ) from error
        self._position += count
        return count


class Archive:
    """The files of one checkpoint, by name relative to its root, with forward slashes.

    Args:
        path: the archive or directory.
        extents: where each file lies.
        marks: of the gzipped file that holds them; None: it is not compressed.
        remark: how it was chosen among others; empty: there were none.

    Attributes:
        sizes: bytes of each file.
        is_compressed: members cannot be mapped; ``unpack`` first.
    """

    def __init__(
        self, path: Path, extents: Mapping[str, Extent], marks: list[Mark] | None = None, remark: str = ""
    ) -> None:
        self.path, self.remark = path, remark
        self.is_compressed = marks is not None
        self._extents = dict(extents)
        self._marks = marks

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by name."""
        return {name: extent.size_bytes for name, extent in self._extents.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._extents

    def identity(self) -> str:
        """Identify the bytes, without reading all of them."""
        paths = {self.path.name if e.path == self.path else name: e.path for name, e in self._extents.items()}
        return identify(paths or {self.path.name: self.path})

    def extent(self, name: str) -> Extent:
        """Return where a file's bytes lie; only for what is not compressed."""
        if self.is_compressed:
            raise ValueError(f"{self.path} is compressed: unpack it before mapping {name}")
        return self._extents[name]

    def on_disk(self, name: str) -> Path:
        """Return the file on disk that holds a file."""
        return self._extents[name].path

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open one file for seeking and for reading what describes its content."""
        if name not in self._extents:
            raise CheckpointError(f"{self.path} has no {name}")
        self.refuse_pointers([name])
        window = _window(self._extents[name], self._marks)
        with BoundedReader(window, f"{self.path}: {name}") as stream:
            yield stream

    def refuse_pointers(self, names: Iterable[str]) -> None:
        """Refuse files in whose places git-lfs has left its pointers; what is opened is looked at anyway.

        Raises:
            CheckpointError: naming the first one.
        """
        for extent in () if self.is_compressed else map(self._extents.__getitem__, names):
            if extent.size_bytes < POINTER_BYTES:
                with _window(extent) as file:
                    refuse_pointer(extent.path, file.read())

    def read_bytes(self, name: str) -> bytes:
        """Read one small file: a configuration, a vocabulary.

        Raises:
            CheckpointError: it is missing, or far too large to be one.
        """
        if self.sizes.get(name, 0) > DESCRIPTION_BYTES:
            raise CheckpointError(
                f"{self.path}: {name} has {self.sizes[name]} bytes", "a file that is not weights has a few MB"
            )
        with self.open(name) as stream:
            return stream.read()

    def unpack(self, directory: Path) -> Archive:
        """Write every file below a directory, in one pass over a compressed archive, and return that as an archive."""
        with io.BufferedReader(_window(Extent(self.path, 0, sys.maxsize), self._marks)) as plain:
            for name, extent in sorted(self._extents.items(), key=lambda entry: entry[1].offset):
                target = directory / name
                target.parent.mkdir(parents=True, exist_ok=True)
                plain.seek(extent.offset)
                with target.open("wb") as stream:
                    for left in range(extent.size_bytes, 0, -_COPY_BYTES):
                        stream.write(plain.read(min(_COPY_BYTES, left)))
        return _open_directory(directory)


def open_archive(path: Path) -> Archive:
    """Open a checkpoint's archive or directory and check every member.

    Raises:
        CheckpointError: missing, not a tar, truncated, or holding a member that escapes or is not a plain file.
    """
    if path.is_dir():
        return _open_directory(path)
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a directory")
    with _window(Extent(path, 0, POINTER_BYTES)) as file:
        start = file.read()
    refuse_pointer(path, start)
    is_gzip = start.startswith(_GZIP_MAGIC)
    marks: list[Mark] | None = [] if is_gzip else None
    window = _window(Extent(path, 0, sys.maxsize), marks)
    with BoundedReader(window, str(path), _HEADER_BYTES) as stream:
        extents, end = _members(path, stream, is_gzip)
        stream.seek(end)
        rest = stream.read(_PADDING_BYTES if is_gzip else _BLOCK_BYTES)
    if is_gzip and len(rest) == _PADDING_BYTES:  # else it was read to its end, where its checksum is compared
        raise CheckpointError(f"{path} holds more after its last member", "this archive is not from NeMo")
    if rest[:_BLOCK_BYTES] != bytes(_BLOCK_BYTES):
        raise CheckpointError(f"{path} is truncated: the tar has no end marker", "copy the checkpoint again")
    return Archive(path, extents, marks)


def _members(path: Path, stream: IO[bytes], is_gzip: bool) -> tuple[dict[str, Extent], int]:
    """List the files of a tar, every member checked; also, where the last one ends."""
    extents: dict[str, Extent] = {}
    end = 0
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            while member := tar.next():
                tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                _check(path, member)
                if is_gzip:
                    _check_growth(path, member)
                end = member.offset_data + -(-member.size // _BLOCK_BYTES) * _BLOCK_BYTES
                if member.isfile():
                    extents[PurePosixPath(member.name).as_posix()] = Extent(path, member.offset_data, member.size)
    except tarfile.TarError as error:
        raise CheckpointError(
            f"{path} is not a tar archive, or it is truncated or damaged ({error})", "copy the checkpoint again"
        ) from error
    return extents, end


def _open_directory(path: Path) -> Archive:
    extents = {}
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder) / name
            if file.is_file():
                extents[file.relative_to(path).as_posix()] = Extent(file, 0, file.stat().st_size)
    return Archive(path, extents)


def _window(extent: Extent, marks: list[Mark] | None = None) -> Window:
    try:
        return Window(extent, None if marks is None else GzipReader(extent.path, marks))
    except OSError as error:
        raise CheckpointError(f"cannot read {extent.path}: {error.strerror}") from error


def _check(path: Path, member: tarfile.TarInfo) -> None:
    """Refuse a member that is not a plain file or directory inside the archive's own root."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name:
        raise CheckpointError(
            f"{path} holds a member that escapes its directory: {member.name!r}", "this archive is not from NeMo"
        )
    if not (member.isfile() or member.isdir()) or member.issparse():
        kind = "link" if member.issym() or member.islnk() else "special file"
        raise CheckpointError(f"{path} holds a {kind}: {member.name!r}", "only plain files are read from archives")


def _check_growth(path: Path, member: tarfile.TarInfo) -> None:
    """Refuse a small file that unpacks without end, before it is unpacked."""
    allowed_bytes = max(_UNSUSPECTED_BYTES, _LARGEST_GROWTH * path.stat().st_size)
    if member.offset_data + member.size > allowed_bytes:
        raise CheckpointError(
            f"{path} would unpack to more than {_LARGEST_GROWTH} times its size: {member.name!r} has "
            f"{member.size} bytes",
            "weights do not compress so well; unpack it by hand if you trust it",
        )
