"""What proves a checkpoint's bytes where its format has no checksums: digests that lie beside it, or a pinned one.

Digests that are looked for, by file: ``<file>.sha256``, a list such as ``SHA256SUMS``, Megatron-LM's list
(``integrity``), what huggingface_hub notes of a download (``.cache/huggingface/download``), the names in its cache
(``blobs/<digest>``), and in a clone the git-lfs pointers that were committed (``git_clone``).

The SHA-256 of a checkpoint is that of its one file; of a directory, that of what ``sha256sum`` prints for its files in
the order of their names, without those that are no part of it. Within the directory, on one line:

    find -L . -type f -not -path './.git/*' -not -path './.cache/*' -not -path ./.fetched.json -print0
    | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.git_clone import pointed_digests
from export_scripts.checkpoints.integrity import listed_digests
from export_scripts.weights.schema import LazyTensor
from handover.digests import CRC32_BLOCKS, SHA256, SummedRange, file_digest, joined_digest
from handover.errors import CheckpointError

UNPROVED = (
    "nothing can prove that the weights are those that were saved: the format has no checksums, and no digests lie "
    "beside the files; the manifest records a digest of them, and export.model.checkpoint_sha256 pins one"
)
NOTHING_READ: Mapping[str, Sequence[SummedRange]] = {}
_NO_PART = (".git/", ".cache/", ".fetched.json")
_LISTS = ("SHA256SUMS", "SHA256SUMS.txt", "sha256sums.txt", "sha256sum.txt", "checksums.sha256")
_SUFFIXES = (".sha256", ".sha256sum")
_DOWNLOADS = ".cache/huggingface/download"
_LINE = re.compile(r"\\?([0-9a-fA-F]{64})(?:\s+\*?(\S.*?))?\s*$")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 1 << 20  # of a file with digests


def files_of(archive: Archive) -> dict[str, Path]:
    """List a checkpoint's files on disk by their names below it; the members of a tar are one file.

    What the user gave from elsewhere, an adapter or a tokenizer, is no part of it.
    """
    if archive.path.is_file():
        return {archive.path.name: archive.path}
    paths = {path for name in archive.sizes if (path := archive.on_disk(name)).is_relative_to(archive.path)}
    names = {path.relative_to(archive.path).as_posix(): path for path in paths}
    return {name: names[name] for name in sorted(names, key=os.fsencode) if not name.startswith(_NO_PART)}


def sha256_of(archive: Archive, processes: int = 1) -> str:
    """Return the SHA-256 of a checkpoint, 64 hexadecimal digits; every byte is read."""
    digests = _digests(files_of(archive), file_digest, processes)
    if archive.path.is_file():
        return digests[archive.path.name].partition(":")[2]
    lines = (f"{digest.partition(':')[2]}  ./".encode() + os.fsencode(name) + b"\n" for name, digest in digests.items())
    return hashlib.sha256(b"".join(lines)).hexdigest()


def crc32_of(archive: Archive, processes: int = 1, read: Mapping[str, Sequence[SummedRange]] = NOTHING_READ) -> str:
    """Return a digest of a checkpoint that costs little beyond reading it: SHA-256 over its files' ``crc32-1m``.

    Args:
        archive: the checkpoint.
        processes: files that are read at a time, at most.
        read: ranges whose checksums are known, by the path of their file without links; the rest is read.
    """

    def digest(path: Path) -> str:
        return joined_digest(path, read.get(str(path.resolve()), ()))

    digests = _digests(files_of(archive), digest, processes)
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    return f"{CRC32_BLOCKS}:{hashlib.sha256(lines.encode(errors='surrogateescape')).hexdigest()}"


def check_pinned(archive: Archive, wanted: str, processes: int) -> None:
    """Compare a checkpoint with the SHA-256 that is pinned.

    Raises:
        CheckpointError: it is another one.
    """
    found = sha256_of(archive, processes)
    if found != wanted.lower():
        raise CheckpointError(
            f"{archive.path} has the SHA-256 {found}, and export.model.checkpoint_sha256 pins {wanted.lower()}",
            "copy the right checkpoint; or pin this one, if you know where it comes from",
        )


def check_published(archive: Archive, processes: int) -> dict[str, str]:
    """Compare a checkpoint's files with the digests that lie beside them.

    Returns:
        ``sha256:<hex>`` of each file that has one, by its name below the checkpoint.

    Raises:
        CheckpointError: naming every file that is not what its digest says.
    """
    files = files_of(archive)
    wanted = {name: f"{SHA256}:{digest}" for name, digest in _published(archive, files).items()}
    found = _digests({name: files[name] for name in wanted}, file_digest, processes)
    damaged = [f"{name}  {found[name]} instead of {wanted[name]}" for name in wanted if found[name] != wanted[name]]
    if damaged:
        raise CheckpointError(
            f"{archive.path}: {len(damaged)} files are not what the digests beside them say\n  " + "\n  ".join(damaged),
            "copy or download the checkpoint again; if it was you who changed it, remove the digests, or git add it",
        )
    return wanted


def unproved(archive: Archive, tensors: Iterable[LazyTensor], published: Mapping[str, str]) -> tuple[str, ...]:
    """List the files of which nothing can say whether the weights in them are those that were saved."""
    if archive.is_compressed:
        return ()  # gzip's checksum is compared
    names = {name for tensor in tensors for name in tensor.unproved}
    on_disk = {name: archive.on_disk(name) for name in names if name in archive}
    proved = {path for name, path in files_of(archive).items() if name in published}
    return tuple(sorted(name for name, path in on_disk.items() if path not in proved))


def _digests(files: Mapping[str, Path], digest: Callable[[Path], str], processes: int) -> dict[str, str]:
    try:
        with ThreadPoolExecutor(max(1, min(processes, len(files)))) as pool:
            return dict(zip(files, pool.map(digest, files.values()), strict=True))
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}", "copy the checkpoint again") from error


def _published(archive: Archive, files: Mapping[str, Path]) -> dict[str, str]:
    """Find the digests of files, by name: 64 hexadecimal digits."""
    root = archive.path.parent if archive.path.is_file() else archive.path
    found = {**pointed_digests(root, files), **listed_digests(files)}
    for listing in _LISTS:
        found |= {name: digest for digest, name in _lines(root / listing) if name in files}
    for name, path in files.items():
        for suffix in _SUFFIXES:
            for digest, _ in _lines(path.with_name(path.name + suffix))[:1]:
                found[name] = digest
        noted = _text(root / _DOWNLOADS / f"{name}.metadata").splitlines()
        target = path.resolve()
        for digest in (*noted[1:2], *([target.name] if target.parent.name == "blobs" else [])):
            if _DIGEST.fullmatch(digest):
                found[name] = digest
    return found


def _lines(path: Path) -> list[tuple[str, str]]:
    """Read digests and names, as ``sha256sum`` writes them."""
    matches = (_LINE.match(line) for line in _text(path).splitlines())
    return [(match[1].lower(), (match[2] or "").removeprefix("./")) for match in matches if match]


def _text(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return ""
        return path.read_text(errors="replace")
    except OSError:
        return ""
