"""A manifest says what a directory holds, what it was made from and by which code.

It is the file ``manifest.json`` at the root of every artefact. A stage receives the previous
stage's manifest and nothing else; a server proves the weights by it before it starts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handover.digests import file_digest
from handover.durable import is_temporary, sync_tree, write_atomically
from handover.errors import ArtefactError

FILE_NAME = "manifest.json"
SIGNATURE, PROVENANCE, BILL = SIGNED_NAMES = ("model.sig", "provenance.intoto.json", "bom.cdx.json")
"""Files at an artefact's root by which it is signed. They are no part of its content, and in no manifest: what is
signed twice is the same model. See ``handover.signatures``."""
WORK_FILE = ".slipway-work.json"
"""Lies in the directory of an artefact that is being made: whoever finds it there knows that the directory is ours."""
REPLACED = ".replaced-"
"""In the name of an artefact that a later one has taken the place of; a time follows."""
RANDOM_WEIGHTS = "random_weights"
"""Key of ``made_from``, true where weights are made up: what is measured says nothing about accuracy."""
QUANTIZED = "quantized"
"""Key of ``made_from``: the tensors that were quantized, with the error of each and of its worst row."""
ORIGIN = "ft_checkpoint_origin"
"""Key of a model repository's ``made_from``: what its FT checkpoint was made from, and by which code."""
_SMALL_BYTES = 1 << 20
_BLOCK_BYTES, _BLOCKS = 4 << 10, 16


@dataclass(frozen=True)
class FileRecord:
    """One file of an artefact.

    Attributes:
        path: relative to the artefact's root, with forward slashes.
        size_bytes: length of the file.
        digest: ``<algorithm>:<hex>`` of its content; see ``handover.digests``.
        shape: of the tensor it holds, if it holds one.
        dtype: of that tensor: fp32, fp16 or bf16.
    """

    path: str
    size_bytes: int
    digest: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest file.

    Attributes:
        kind: what the artefact is: ft_checkpoint, model_repository, evaluation, benchmark, report.
        files: every file below the root but the manifest itself, by path.
        made_from: what went in, by name: paths, digests, settings.
        made_by: the code: project version and commit.
        fingerprint: of the plan that made it; empty until the runner seals it.
    """

    kind: str
    files: tuple[FileRecord, ...]
    made_from: Mapping[str, Any] = field(default_factory=dict)
    made_by: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""

    @property
    def digest(self) -> str:
        """``sha256:<hex>`` over paths, sizes and digests: the identity of the content."""
        lines = sorted(f"{record.path}\0{record.size_bytes}\0{record.digest}\n" for record in self.files)
        return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(record.size_bytes for record in self.files)

    def to_text(self) -> str:
        """Render as JSON, a line for each file."""
        fields = {"digest": self.digest, **vars(self)}
        records = ",\n  ".join(json.dumps(vars(record)) for record in fields.pop("files"))
        content = json.dumps(fields, indent=1).removesuffix("\n}")
        return f'{content},\n "files": [\n  {records}\n ]\n}}\n'

    def write(self, root: Path) -> None:
        """Wait until the files are on the disk, then write ``root/manifest.json``: what has a manifest is finished."""
        sync_tree(root)
        self.save(root)

    def save(self, root: Path) -> None:
        """Write atomically to ``root/manifest.json``; the files are on the disk already."""
        write_atomically(root / FILE_NAME, self.to_text())

    @classmethod
    def read(cls, root: Path) -> Manifest:
        """Read ``root/manifest.json``; raise ArtefactError if it is missing or damaged."""
        path = root / FILE_NAME
        try:
            content = json.loads(path.read_text())
            recorded = content.pop("digest")
            files = tuple(
                FileRecord(**{**record, "shape": tuple(record["shape"]) if record["shape"] is not None else None})
                for record in content.pop("files")
            )
            manifest = cls(files=files, **content)
            _check_types(manifest)
        except FileNotFoundError:
            raise ArtefactError(f"{root} has no {FILE_NAME}", "it is not a finished artefact; make it again") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArtefactError(f"{path} is damaged: {error}", "make the artefact again") from error
        if recorded != manifest.digest:
            raise ArtefactError(f"{path} was altered: its digest is not that of the files it lists")
        return manifest

    def problems(self, root: Path, check_digests: bool = True) -> list[str]:
        """Compare the directory with this manifest.

        Args:
            root: the artefact's directory.
            check_digests: read every byte; otherwise presence and size only.

        Returns:
            One line for each missing, wrong-sized or altered file, sorted by path; empty if all is well.
        """
        return self._compare(root, lambda path, record: check_digests)

    def damages(self, root: Path) -> list[str]:
        """Compare as far as that is cheap, for work that is about to be relied on without being read.

        Presence and size of all files are compared, and the content of small ones and of those with a block of zeros,
        which is what a loss of power leaves of what was not on disk yet.
        """
        return self._compare(root, lambda path, record: record.size_bytes <= _SMALL_BYTES or _has_zeros(path))

    def _compare(self, root: Path, is_read: Callable[[Path, FileRecord], bool]) -> list[str]:
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            found = pool.map(lambda record: _problem(root, record, is_read), self.files)
            return sorted(problem for problem in found if problem)


def _check_types(manifest: Manifest) -> None:
    """Refuse what is JSON and no manifest.

    Raises:
        TypeError: it is not.
    """
    expected = {"kind": str, "fingerprint": str, "made_from": dict, "made_by": dict}
    for name, kind in expected.items():
        if not isinstance(getattr(manifest, name), kind):
            raise TypeError(f"{name} is not a {kind.__name__}")
    for record in manifest.files:
        if not (isinstance(record.path, str) and type(record.size_bytes) is int and isinstance(record.digest, str)):
            raise TypeError(f"the record of {str(record.path)[:80]!r} has no path, size and digest")
        if record.path.startswith("/") or ".." in record.path.split("/"):
            raise ValueError(f"the record of {record.path[:80]!r} leads out of the artefact")


def _has_zeros(path: Path) -> bool:
    """Whether one of a few blocks of a large file, the first and the last among them, is zeros throughout."""
    with path.open("rb") as stream:
        last = stream.seek(0, os.SEEK_END) - _BLOCK_BYTES
        for number in range(_BLOCKS):
            stream.seek(last * number // (_BLOCKS - 1))
            if not any(stream.read(_BLOCK_BYTES)):
                return True
    return False


def _problem(root: Path, record: FileRecord, is_read: Callable[[Path, FileRecord], bool]) -> str | None:
    path = root / record.path
    try:
        size_bytes = path.stat().st_size
    except OSError:
        return f"{record.path}  missing"
    if size_bytes != record.size_bytes:
        return f"{record.path}  {size_bytes} bytes instead of {record.size_bytes}"
    try:
        if is_read(path, record) and file_digest(path, record.digest) != record.digest:
            return f"{record.path}  content differs from its digest {record.digest[:19]}"
    except OSError as error:
        return f"{record.path}  cannot be read: {error.strerror}"
    return None


def artefact_files(root: Path) -> list[str]:
    """List what a directory holds, relative to it.

    Left out are its manifest, the signatures over it, and what stands there only while it is made.
    """
    found = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    kept = (name for name in found if name not in (FILE_NAME, WORK_FILE, *SIGNED_NAMES))
    return sorted(name for name in kept if not any(map(is_temporary, name.split("/"))))


def record_files(root: Path) -> tuple[FileRecord, ...]:
    """Record every file below a directory, by path."""
    paths = ((name, root / name) for name in artefact_files(root))
    return tuple(FileRecord(name, path.stat().st_size, file_digest(path)) for name, path in paths)
