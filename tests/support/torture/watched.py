"""Drive ``watched_pipeline.py``: runs that are killed after some file operations, or that write all of them down."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
_TOKEN = re.compile(r"\.[0-9a-f]{8}\.slipway-tmp")
_NUMBER = re.compile(r"\d+")
_REPLACED = re.compile(r"\.replaced-\d{8}-\d{6}x*$")


@dataclass(frozen=True)
class Operation:
    """One operation on a file or directory.

    Attributes:
        kind: create, write, rename, link, unlink, mkdir, truncate or fsync.
        paths: what it is done to; a rename and a link have two.
        number: where a write begins, the size that a truncate gives, 1 for a create that empties.
        content: what a write writes.
    """

    kind: str
    paths: tuple[str, ...]
    number: int = 0
    content: bytes = b""

    @property
    def sort(self) -> tuple[str, ...]:
        """The kind, and the paths without what differs from one shard or run to the next."""
        paths = (_NUMBER.sub("N", _TOKEN.sub(".tmp", path)) for path in self.paths)
        return self.kind, *(re.sub(r"model\.[\w.]+\.bin", "SHARD", path) for path in paths)


def read_log(log: Path) -> list[Operation]:
    """Read the operations that a run wrote down."""
    operations, left = [], log.read_bytes()
    while left:
        line, _, left = left.partition(b"\n")
        kind, *fields = line.decode().split("\t")
        if kind == "write":
            path, start, size = fields
            operations.append(Operation(kind, (path,), int(start), left[: int(size)]))
            left = left[int(size) :]
        elif kind in ("create", "truncate"):
            operations.append(Operation(kind, (fields[0],), int(fields[1])))
        else:
            operations.append(Operation(kind, tuple(fields)))
    return operations


class Pipeline:
    """The stages over one directory, as often as is wanted.

    Args:
        folder: for everything; on a file system in memory it is quick.
        checkpoint: to convert.
    """

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.root, self.printed, self.log = folder / "root", folder / "printed", folder / "operations"
        self.root.mkdir()
        library = folder / "file_operations.so"
        source = HERE / "file_operations.c"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self._process = subprocess.Popen(
            [sys.executable, HERE / "watched_pipeline.py", self.root, checkpoint],
            env={**os.environ, "LD_PRELOAD": str(library)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def run(self, force: bool = False, stop_after: int = -1, is_torn: bool = False, log: Path | None = None) -> int:
        """Run the stages; returns the exit status, negative for the signal that killed it."""
        self.printed.unlink(missing_ok=True)
        request = {"output": str(self.printed), "force": force, "stop_after": stop_after, "is_torn": is_torn}
        assert self._process.stdin
        self._process.stdin.write(json.dumps({**request, "log": str(log) if log else None}) + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def operations(self, force: bool = False) -> list[Operation]:
        """Run to the end; returns what it did."""
        self.log.unlink(missing_ok=True)
        assert self.run(force, log=self.log) == 0, self.printed.read_text()
        return read_log(self.log)

    def reset(self, state: Path | None = None) -> None:
        """Empty the directory, or bring it back to a state that was kept."""
        for path in self.root.iterdir():
            shutil.rmtree(path)
        if state:
            subprocess.run(["cp", "-a", f"{state}/.", self.root], check=True)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def pipeline_over(folder: Path, checkpoint: Path) -> Iterator[Pipeline]:
    pipeline = Pipeline(folder, checkpoint)
    try:
        yield pipeline
    finally:
        pipeline.close()


def tree(root: Path) -> dict[str, str]:
    """Digest of every file below a directory by its path, but for logs; of what tells times only that it is there.

    A killed server's endpoint file is left out too: the real one's supervisor removes it.
    """
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            found[name + "/"] = ""
        elif path.suffix != ".log" and path.name != "endpoint.json":
            found[name] = "" if path.name == "stages.json" else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def without_replaced(found: Mapping[str, str], whole: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Take the artefacts apart that a later one replaced; each must be whole.

    Returns:
        The rest, and a line for each that is not what the one in its place is.
    """
    rest, replaced = {}, dict[str, dict[str, str]]()
    for name, digest in found.items():
        parts = name.split("/")
        at = next((index for index, part in enumerate(parts) if _REPLACED.search(part)), None)
        if at is None:
            rest[name] = digest
        else:
            replaced.setdefault("/".join(parts[: at + 1]), {})["/".join(parts[at + 1 :])] = digest
    problems = []
    for name, files in replaced.items():
        original = _REPLACED.sub("", name) + "/"
        wanted = {path.removeprefix(original): d for path, d in whole.items() if path.startswith(original)}
        if files != wanted:
            problems.append(f"{name} is not whole")
    return rest, problems


def own_digest(algorithm: str, content: bytes) -> str:
    """Digest of a file's content as a manifest has it, by another implementation than the product's."""
    if algorithm == "crc32-1m":
        blocks = (content[start : start + (1 << 20)] for start in range(0, len(content), 1 << 20))
        content = b"".join(zlib.crc32(block).to_bytes(4, "big") for block in blocks)
    return hashlib.sha256(content).hexdigest()


def unfinished(root: Path) -> list[str]:
    """Say what looks finished in a directory and is not what its manifest says; our own reading of manifests."""
    problems = []
    for manifest in root.rglob("manifest.json"):
        folder = manifest.parent
        if any(part.endswith((".partial", ".slipway-tmp")) for part in folder.parts):
            continue
        for record in json.loads(manifest.read_text())["files"]:
            file, (algorithm, _, digest) = folder / record["path"], record["digest"].partition(":")
            if not file.is_file() or file.stat().st_size != record["size_bytes"]:
                problems.append(f"{file.relative_to(root)} is not whole")
            elif own_digest(algorithm, file.read_bytes()) != digest:
                problems.append(f"{file.relative_to(root)} has another content")
    return problems


def differences(found: Mapping[str, str], whole: Mapping[str, str]) -> list[str]:
    """Name what is missing, left over or different, compared with a run that nothing disturbed."""
    rest, problems = without_replaced(found, whole)
    problems += [f"missing: {name}" for name in whole.keys() - rest.keys()]
    problems += [f"left over: {name}" for name in rest.keys() - whole.keys()]
    return problems + [f"differs: {name}" for name in whole.keys() & rest.keys() if whole[name] != rest[name]]


def failure_of(pipeline: Pipeline, whole: Mapping[str, str], force: bool) -> str | None:
    """Run once more after a fault; says what is wrong with that, or None."""
    problems = unfinished(pipeline.root)
    status = pipeline.run(force)
    if status:
        problems.append(f"the next run ended with {status}: {pipeline.printed.read_text()[-600:]}")
    else:
        problems += differences(tree(pipeline.root), whole)
        states = {entry["state"] for entry in json.loads(next(pipeline.root.rglob("stages.json")).read_text())}
        problems += [] if states <= {"done", "skipped"} else [f"stages are {states}"]
    return "; ".join(problems) or None
