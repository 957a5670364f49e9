"""Digests that a clone's index has of files that git-lfs keeps: those of the pointers that were committed.

Git reads the index and the objects for us, where it is installed, but never the clone's own configuration, which may
name programs to run: it works in an empty repository of its own that borrows the two.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from export_scripts.checkpoints.files.lfs_pointer import POINTER_BYTES, parse_pointer

_LIMIT_S = 60
_PLAIN_FILES = ("100644", "100755")


def pointed_digests(root: Path, files: Mapping[str, Path]) -> dict[str, str]:
    """Find the SHA-256 of files as a clone's index has it.

    Returns:
        64 hexadecimal digits, by name; nothing without a clone, without git, or where git cannot read the clone.
    """
    root = root.resolve()
    clone = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), None)
    if clone is None:
        return {}
    try:
        fetched = {name: path for name, path in files.items() if not _is_pointer(path)}
        names = {os.path.relpath(path.parent.resolve() / path.name, clone): name for name, path in fetched.items()}
        with tempfile.TemporaryDirectory(prefix="slipway-git-") as own:
            git = _Git(Path(own), _git_directory(clone / ".git"))
            blobs = dict(git.blobs(os.path.relpath(root, clone)))
            wanted = {path: blob for path, blob in blobs.items() if path in names}
            pointers = git.pointers(set(wanted.values()))
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return {names[path]: pointers[blob] for path, blob in wanted.items() if blob in pointers}


def _is_pointer(path: Path) -> bool:
    """Whether git-lfs has not fetched a file; one that is to be read is refused by whoever opens it."""
    return path.stat().st_size < POINTER_BYTES and parse_pointer(path.read_bytes()) is not None


def _git_directory(path: Path) -> Path:
    """Where a clone keeps its index; in worktrees and submodules ``.git`` is a file that says so."""
    if path.is_dir():
        return path
    return path.parent / path.read_text().removeprefix("gitdir: ").rstrip("\n")


class _Git:
    """Git in an empty repository that borrows another one's index and objects.

    Args:
        own: an empty directory, for the repository.
        theirs: directory of the other one's index.
    """

    def __init__(self, own: Path, theirs: Path) -> None:
        common = theirs / "commondir"
        objects = (theirs / common.read_text().rstrip("\n") if common.is_file() else theirs) / "objects"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        alone = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_LITERAL_PATHSPECS": "1"}
        self._environment = {**kept, **alone, "GIT_DIR": str(own)}
        self._run("init", "--quiet", "--bare", "--template=")
        borrowed = {"GIT_INDEX_FILE": str(theirs / "index"), "GIT_OBJECT_DIRECTORY": str(objects)}
        self._environment |= borrowed

    def blobs(self, folder: str) -> Iterator[tuple[str, str]]:
        """List the plain files below a folder as they are in the index: path and object."""
        for line in self._run("ls-files", "--stage", "-z", "--", folder).split(b"\0")[:-1]:
            about, _, path = line.partition(b"\t")
            mode, blob, _ = about.decode().split()
            if mode in _PLAIN_FILES:
                yield os.fsdecode(path), blob

    def pointers(self, blobs: Iterable[str]) -> dict[str, str]:
        """Find the pointers among objects: the SHA-256 that each says."""
        sizes = self._run("cat-file", "--batch-check=%(objectname) %(objectsize)", given=blobs)
        small = [fields[0] for fields in map(str.split, sizes.decode().splitlines()) if _is_small(fields[1])]
        found = {}
        content = self._run("cat-file", "--batch=%(objectname) %(objectsize)", given=small)
        while content:
            head, _, content = content.partition(b"\n")
            blob, size = head.decode().split()
            pointer = parse_pointer(content[: int(size)])
            if pointer and not pointer.is_stored_otherwise:
                found[blob] = pointer.sha256
            content = content[int(size) + 1 :]
        return found

    def _run(self, *arguments: str, given: Iterable[str] = ()) -> bytes:
        command, lines = ["git", *arguments], "".join(f"{line}\n" for line in given)
        done = subprocess.run(
            command,
            input=lines.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            cwd=self._environment["GIT_DIR"],
            timeout=_LIMIT_S,
            check=True,
        )
        return done.stdout


def _is_small(size: str) -> bool:
    return size.isdecimal() and int(size) < POINTER_BYTES  # else the object is missing, or no pointer
