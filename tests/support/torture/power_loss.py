"""A disk whose machine loses its power: a model of a file system, which operations that were written down are done to.

It promises what POSIX does and no more. A file's content is safe once the file was synced, an entry of a directory
once the directory was; syncing one says nothing of the other. Of anything else that was done any part may have reached
the disk: the entries of a directory, each by itself; of a file its old content, zeros in the length of the new, a
half, or all of it. A rename within a directory happens or not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from support.torture.watched import Operation

NAMES = ("all", "none", "some")
CONTENTS = ("lost", "zeros", "half", "any")


@dataclass(eq=False)
class File:
    """Content as programs see it, and as it is safe."""

    content: bytes = b""
    safe: bytes = b""

    def after_loss(self, how: str, rng: Random) -> bytes:
        """What may be read when the power is back."""
        if how == "any":
            how = rng.choice(("lost", "zeros", "half", "all"))
        if self.content == self.safe or how == "lost":
            return self.safe
        same = len(os.path.commonprefix([self.content, self.safe]))
        if how == "zeros":
            return self.content[:same] + bytes(len(self.content) - same)
        return self.content[: (same + len(self.content)) // 2] if how == "half" else self.content


@dataclass(eq=False)
class Directory:
    """Entries as programs see them, as they are safe, and the changes between the two, in their order.

    A change is the name that an entry loses, if it does, the name that it gets, if it does, and the entry.
    """

    entries: dict[str, File | Directory] = field(default_factory=dict)
    safe: dict[str, File | Directory] = field(default_factory=dict)
    changes: list[tuple[str | None, str | None, File | Directory]] = field(default_factory=list)

    def change(self, old: str | None, new: str | None, entry: File | Directory) -> None:
        self.changes.append((old, new, entry))
        _apply(self.entries, *self.changes[-1])

    def sync(self) -> None:
        self.safe, self.changes = dict(self.entries), []

    def after_loss(self, how: str, rng: Random) -> dict[str, File | Directory]:
        """Entries that may be there when the power is back."""
        found = dict(self.safe)
        for change in self.changes:
            if how == "all" or (how == "some" and rng.random() < 0.5):
                _apply(found, *change)
        return found


def _apply(entries: dict[str, File | Directory], old: str | None, new: str | None, entry: File | Directory) -> None:
    if old is not None and entries.get(old) is entry:
        del entries[old]
    if new is not None:
        entries[new] = entry


class Disk:
    """What is on the disk below one directory.

    Args:
        root: the directory; what is in it now is safe.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._links: dict[int, File] = {}
        self._top = self._read(root)

    def _read(self, folder: Path) -> Directory:
        directory = Directory()
        for path in folder.iterdir():
            if path.is_dir():
                directory.entries[path.name] = self._read(path)
            else:
                content = path.read_bytes()
                directory.entries[path.name] = self._links.setdefault(path.stat().st_ino, File(content, content))
        directory.sync()
        return directory

    def _find(self, path: str) -> tuple[Directory, str]:
        """Directory that a path's last name is in, and that name; for the root itself an empty one."""
        *folders, name = Path(path).relative_to(self.root).parts or ("",)
        directory = self._top
        for folder in folders:
            below = directory.entries[folder]
            assert isinstance(below, Directory), path
            directory = below
        return directory, name

    def do(self, operation: Operation) -> None:
        """Do one operation."""
        directory, name = self._find(operation.paths[0])
        entry = directory.entries.get(name) if name else directory
        if operation.kind == "fsync":
            if isinstance(entry, File):
                entry.safe = entry.content
            elif entry:
                entry.sync()
        elif operation.kind in ("create", "mkdir"):
            if entry is None:
                directory.change(None, name, Directory() if operation.kind == "mkdir" else File())
            elif isinstance(entry, File) and operation.number:
                entry.content = b""
        elif isinstance(entry, File) and operation.kind == "write":
            start = entry.content[: operation.number].ljust(operation.number, b"\0")
            entry.content = start + operation.content + entry.content[len(start) + len(operation.content) :]
        elif isinstance(entry, File) and operation.kind == "truncate":
            entry.content = entry.content[: operation.number].ljust(operation.number, b"\0")
        elif entry:
            self._move(operation, directory, name, entry)

    def _move(self, operation: Operation, directory: Directory, name: str, entry: File | Directory) -> None:
        if operation.kind == "unlink":
            directory.change(name, None, entry)
            return
        target, new = self._find(operation.paths[1])
        if operation.kind == "link" or target is not directory:
            target.change(None, new, entry)
        if operation.kind == "rename":
            directory.change(name, new if target is directory else None, entry)

    def lose_power(self, names: str, contents: str, rng: Random) -> None:
        """Put into the real directory what may be on the disk now."""
        written: dict[int, Path] = {}
        self._write(self.root, self._top, (names, contents, rng), written)

    def _write(self, folder: Path, top: Directory, how: tuple[str, str, Random], written: dict[int, Path]) -> None:
        names, contents, rng = how
        for name, entry in top.after_loss(names, rng).items():
            path = folder / name
            if isinstance(entry, Directory):
                path.mkdir()
                self._write(path, entry, how, written)
            elif id(entry) in written:
                path.hardlink_to(written[id(entry)])
            else:
                path.write_bytes(entry.after_loss(contents, rng))
                written[id(entry)] = path


def disk_after(start: Disk, operations: Sequence[Operation]) -> Disk:
    """Do operations to a disk; returns it."""
    for operation in operations:
        start.do(operation)
    return start
