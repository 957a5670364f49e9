"""SHA-256 of files, each content read once: what signatures state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from handover.digests import SHA256, file_digest
from handover.errors import ArtefactError
from handover.manifest import FILE_NAME, SIGNATURE
from handover.progress import Progress
from handover.signatures.library import load

UNSIGNED = (SIGNATURE, FILE_NAME)
"""What a directory's signature does not cover: itself, and the manifest, to which the runner adds its fingerprint. The
manifest says of the files what they are anyway, and what it says beyond that stands in the signed provenance too."""
_SHOWN_BYTES = 1 << 30
"""What takes longer than a second to read has a progress bar."""
_Content = tuple[int, int, int, int]


class FileDigests:
    """SHA-256 of files; those that are links to one content, as a repository's to a checkpoint, are read once."""

    def __init__(self) -> None:
        self._known: dict[_Content, str] = {}

    def know(self, path: Path, digest: str) -> None:
        """Take a digest of 64 hexadecimal digits from who has proved it."""
        self._known[_content(path)] = digest

    def of(self, files: Mapping[str, Path]) -> dict[str, str]:
        """Digest files.

        Returns:
            64 hexadecimal digits for each.

        Raises:
            ArtefactError: a file cannot be read.
        """
        try:
            contents = {name: _content(path) for name, path in files.items()}
            self._read({content: files[name] for name, content in contents.items() if content not in self._known})
        except OSError as error:
            raise ArtefactError(f"cannot read {error.filename}: {error.strerror}") from error
        return {name: self._known[content] for name, content in contents.items()}

    def _read(self, files: Mapping[_Content, Path]) -> None:
        size_bytes = sum(content[2] for content in files)
        bar = Progress("digests", len(files), "files", size_bytes)
        with (
            bar if size_bytes > _SHOWN_BYTES else nullcontext(),
            ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool,
        ):
            for content, digest in zip(files, pool.map(file_digest, files.values()), strict=True):
                self._known[content] = digest.removeprefix(f"{SHA256}:")
                bar.advance(1, content[2])


def _content(path: Path) -> _Content:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class DirectoryHashes:
    """What ``model-signing`` asks for the digests of a directory, in the place of its own reader, which reads twice.

    Args:
        digests: of files.
        names: of the files that are signed; None: all that are there, for a comparison.
    """

    def __init__(self, digests: FileDigests, names: Iterable[str] | None = None) -> None:
        self._digests, self._names = digests, names

    def add_ignored_paths(self, **ignored: Any) -> None:
        """Take note of what a signature says that it leaves out: of ours, that is known."""

    def hash(self, model_path: Path, **chosen: Any) -> Any:
        """Return the library's manifest of the directory."""
        manifest = load("model_signing.manifest", "signing")
        hashing = load("model_signing._hashing.hashing", "signing")
        names = _present(model_path) if self._names is None else self._names
        form = manifest.SerializationType.from_args(
            {"method": "files", "hash_type": SHA256, "allow_symlinks": False, "ignore_paths": UNSIGNED}
        )
        found = self._digests.of({name: model_path / name for name in names})
        items = [form.new_item(name, hashing.Digest(SHA256, bytes.fromhex(hex))) for name, hex in found.items()]
        return manifest.Manifest(model_path.name, items, form)


def _present(root: Path) -> list[str]:
    """List every file but those that no signature covers; links are refused, as ``model-signing`` itself does."""
    found = [path for path in root.rglob("*") if path.is_symlink() or not path.is_dir()]
    for path in found:
        if path.is_symlink():
            raise ArtefactError(f"{path} is a link: what it leads to is not signed", "put the file in its place")
    return sorted(name for path in found if (name := path.relative_to(root).as_posix()) not in UNSIGNED)
