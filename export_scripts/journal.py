"""What a conversion has finished, so that a killed one continues.

The journal is a file in the output directory: a line with the identity of the work, then one line a finished
shard. A line is written before its shard gets its final name, so that every file in the directory is known; a
shard counts as finished only if the file is there with the recorded size.
"""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

from handover.errors import ArtefactError
from handover.manifest import FILE_NAME as MANIFEST
from handover.manifest import FileRecord, Manifest

FILE_NAME = ".journal.jsonl"
TEMPORARY_SUFFIX = ".writing"


class Journal:
    """The journal of one output directory.

    Args:
        root: the output directory; it is made if it is missing.
        identity: of the work: source and settings. Work of another identity is removed, file by recorded file.

    Attributes:
        finished: records of finished shards by file name.

    Raises:
        ArtefactError: the directory holds files that no conversion wrote.
    """

    def __init__(self, root: Path, identity: dict[str, Any]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._path = root / FILE_NAME
        self._lock = threading.Lock()
        written_by, records = _read(self._path)
        known = {record.path for record in records}
        if (root / MANIFEST).is_file():
            known |= {MANIFEST, *(record.path for record in Manifest.read(root).files)}
        present = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
        _check_ours(root, present - known)
        is_same = written_by == json.loads(json.dumps(identity))
        self.finished = {r.path: r for r in records if is_same and _size(root / r.path) == r.size_bytes}
        for name in (known & present) - self.finished.keys():
            (root / name).unlink()
        for temporary in root.glob(f".*{TEMPORARY_SUFFIX}"):
            shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink()
        lines = [json.dumps(identity), *(_line(record) for record in self.finished.values())]
        self._path.write_text("".join(f"{line}\n" for line in lines))
        self._stream = self._path.open("a")

    def add(self, record: FileRecord) -> None:
        """Write down a shard that is whole, just before it gets its name."""
        with self._lock:
            self._stream.write(_line(record) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Keep the journal for the next run."""
        self._stream.close()

    def remove(self) -> None:
        """Everything is finished."""
        self._stream.close()
        self._path.unlink()


def _line(record: FileRecord) -> str:
    return json.dumps(vars(record))


def _read(path: Path) -> tuple[Any, list[FileRecord]]:
    """Read the identity and the records; a last line cut off by a kill is dropped."""
    if not path.is_file():
        return None, []
    content: list[Any] = []
    for line in path.read_text().splitlines():
        try:
            content.append(json.loads(line))
        except ValueError:
            break
    records = [FileRecord(**{**entry, "shape": entry["shape"] and tuple(entry["shape"])}) for entry in content[1:]]
    return (content[0] if content else None), records


def _check_ours(root: Path, unknown: set[str]) -> None:
    foreign = sorted(name for name in unknown - {FILE_NAME} if not _is_temporary(name.partition("/")[0]))
    if foreign:
        raise ArtefactError(
            f"{root} holds {len(foreign)} files that no conversion wrote, {foreign[0]} for one",
            "give an empty or new directory",
        )


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
