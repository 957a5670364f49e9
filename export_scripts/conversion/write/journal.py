"""What a conversion has finished, so that a killed one continues.

The journal is a file in the output directory: a line with the identity of the work, then one line a finished
shard. A line is written before its shard gets its final name, so that every file in the directory is known; a
shard counts as finished only if the file is there with the recorded content. After a power loss lines may be damaged
or missing: a file that is not listed but has a name that this conversion writes is written again.

A large file that several processes write has a line for each part that is finished; until it is whole its name ends
with ``GROWING``. What quantizing has cost is not in the files, so it has lines of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handover.digests import BlockSums, file_digest
from handover.durable import make_directory, remove_temporaries, sync, write_atomically
from handover.errors import ArtefactError
from handover.manifest import FILE_NAME as MANIFEST
from handover.manifest import WORK_FILE, FileRecord, Manifest, artefact_files

FILE_NAME = ".journal.jsonl"
GROWING = ".partial"
"""End of the name of a file that is not whole yet."""
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class PartRecord:
    """A part of a file that grows.

    Attributes:
        path: relative to the output directory, with ``GROWING``.
        offset, size_bytes: of the part in the file.
        sums: CRC-32 of each of the file's blocks, as far as the part reaches, in hexadecimal digits.
    """

    path: str
    offset: int
    size_bytes: int
    sums: str


@dataclass(frozen=True)
class QuantizationRecord:
    """What quantizing some rows of a tensor has cost.

    Attributes:
        tensor: its name.
        row: the first of them.
        squared_error: of all numbers that come back, summed up.
        square: of all numbers.
        worst_row: the row whose error is the largest beside its numbers.
        worst: that ratio, of norms.
    """

    tensor: str
    row: int
    squared_error: float
    square: float
    worst_row: int
    worst: float


Record = FileRecord | PartRecord | QuantizationRecord


class Journal:
    """The journal of one output directory.

    Args:
        root: the output directory; it is made if it is missing.
        identity: of the work: source and settings. Work of another identity is removed, file by recorded file.
        names: of the files that the work consists of.

    Attributes:
        finished: records of finished shards by file name.
        parts: records of finished parts of files that grow, by file name and offset.
        costs: of finished rows of quantized tensors, by tensor and first row.

    Raises:
        ArtefactError: the directory holds files that no conversion wrote.
    """

    def __init__(self, root: Path, identity: dict[str, Any], names: Collection[str] = ()) -> None:
        make_directory(root)
        self._path = root / FILE_NAME
        written_by, records, parts, costs = _read(self._path)
        is_ours = written_by is not None or (root / WORK_FILE).is_file()
        present = set(artefact_files(root)) - {FILE_NAME}
        noted = {record.path for record in records} | {part.path for part in parts}
        known = noted | _listed(root, is_ours) | set(names if is_ours else ())
        _check_ours(root, present - known)
        is_same = written_by == json.loads(json.dumps(identity))
        self.finished = _proved(root, records) if is_same else {}
        self.parts = {(part.path, part.offset): part for part in parts if _is_whole(root, part)} if is_same else {}
        self.costs = {(cost.tensor, cost.row): cost for cost in costs} if is_same else {}
        _remove(root, present - self.finished.keys() - {name for name, _ in self.parts})
        kept: tuple[Record, ...] = (*self.finished.values(), *self.parts.values(), *self.costs.values())
        write_atomically(self._path, "\n".join([json.dumps(identity), *map(_line, kept)]))
        self._stream = os.open(self._path, os.O_WRONLY | os.O_APPEND)

    def add(self, record: Record) -> None:
        """Write down a shard that is whole, just before it gets its name, or a part that is written, after its costs.

        A line begins with its line feed: one that a full disk cut off then spoils no other. It is one write, which
        the processes that share the journal do not mix.
        """
        line = f"\n{_line(record)}".encode()
        while line:
            line = line[os.write(self._stream, line) :]

    def close(self) -> None:
        """Keep the journal for the next run."""
        if self._stream >= 0:
            os.close(self._stream)
            self._stream = -1

    def remove(self) -> None:
        """Everything is finished."""
        self.close()
        self._path.unlink()
        sync(self._path.parent)


def _line(record: Record) -> str:
    return json.dumps(vars(record))


def _read(path: Path) -> tuple[Any, list[FileRecord], list[PartRecord], list[QuantizationRecord]]:
    """Read the identity, the files, the parts and the costs; a line that is cut off or damaged is dropped."""
    records: list[FileRecord] = []
    parts: list[PartRecord] = []
    costs: list[QuantizationRecord] = []
    if not path.is_file():
        return None, records, parts, costs
    identity, *lines = path.read_bytes().split(b"\n")
    for line in lines:
        try:
            entry = json.loads(line)
            if "offset" in entry:
                parts.append(
                    PartRecord(str(entry["path"]), int(entry["offset"]), int(entry["size_bytes"]), entry["sums"])
                )
            elif "tensor" in entry:
                costs.append(QuantizationRecord(**entry))
            else:
                records.append(FileRecord(**{**entry, "shape": entry["shape"] and tuple(entry["shape"])}))
        except (ValueError, KeyError, TypeError):
            continue
    try:
        return json.loads(identity), records, parts, costs
    except ValueError:
        return None, records, parts, costs


def _listed(root: Path, is_ours: bool) -> set[str]:
    """Names in a manifest, which says that a conversion was finished here; a damaged one says nothing."""
    if not (root / MANIFEST).is_file():
        return set()
    try:
        return {record.path for record in Manifest.read(root).files}
    except ArtefactError:
        if not is_ours:
            raise
        return set()


def _proved(root: Path, records: Collection[FileRecord]) -> dict[str, FileRecord]:
    """Keep the files that are there and hold what was written: a power loss may have left other bytes."""

    def is_whole(record: FileRecord) -> bool:
        path = root / record.path
        if not path.is_file() or path.stat().st_size != record.size_bytes:
            return False
        return file_digest(path, record.digest) == record.digest

    last = {record.path: record for record in records}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        whole = pool.map(is_whole, last.values())
        return {path: record for (path, record), is_so in zip(last.items(), whole, strict=True) if is_so}


def _is_whole(root: Path, part: PartRecord) -> bool:
    """Whether a part is there and holds what was written."""
    path = root / part.path
    if not part.path.endswith(GROWING) or not path.is_file():
        return False
    sums, left = BlockSums(part.offset), part.size_bytes
    with path.open("rb") as stream:
        stream.seek(part.offset)
        while left and (chunk := stream.read(min(left, _CHUNK_BYTES))):
            sums.update(chunk)
            left -= len(chunk)
    return not left and sums.sums().hex() == part.sums


def _remove(root: Path, names: Collection[str]) -> None:
    """Remove what is to be made again, the manifest first; until that is on the disk the old journal stays."""
    (root / MANIFEST).unlink(missing_ok=True)
    for name in sorted(names):
        (root / name).unlink()
    remove_temporaries(root)
    sync(root)


def _check_ours(root: Path, unknown: Collection[str]) -> None:
    if unknown:
        raise ArtefactError(
            f"{root} holds {len(unknown)} files that no conversion wrote, {min(unknown)} for one",
            "give an empty or new directory",
        )
