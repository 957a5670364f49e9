r"""What a conversion cannot do without: read a checkpoint, write as many bytes, and take the checksums of both.

    python3 -m benchmarks.convert.bound --checkpoint=/dev/shm/gpt --output=/dev/shm/copy --files=2

Nothing is rearranged, looked at or noted, and nothing is imported for it. ``benchmarks.convert.speed --bound=true``
times it beside ``cp`` and the conversion.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from handover.arguments import ScriptArguments
from handover.digests import crc32
from handover.errors import exit_status

_PART_BYTES, _RUN_BYTES = 16 << 20, 512 << 10  # of a conversion of 2 GB
_WRITE_BYTES = 256 << 10


@dataclass(frozen=True)
class BoundArguments(ScriptArguments):
    """What is read, and where it is written."""

    checkpoint: Path = field(metadata={"help": "a directory, or a file"})
    output: Path = field(metadata={"help": "the directory to write to"})
    files: int = field(default=1, metadata={"help": "that are written to"})
    processes: int = field(default=2, metadata={"help": "that share the work"})


def main(argv: Sequence[str]) -> None:
    """Copy in parts, which the processes take in turn."""
    arguments = BoundArguments.from_argv(argv, description=__doc__)
    found = (arguments.checkpoint, *arguments.checkpoint.rglob("*"))
    paths = [path for path in found if path.is_file()]
    parts, end = list[tuple[Path, int, int, int]](), 0
    for path in paths:
        size = path.stat().st_size
        for start in range(0, size, _PART_BYTES):
            parts.append((path, start, min(_PART_BYTES, size - start), end + start))
        end += size
    arguments.output.mkdir()
    for number in range(arguments.files):
        with (arguments.output / str(number)).open("wb") as file:
            file.truncate(end)
    children = []
    for first in range(arguments.processes):
        child = os.fork()
        if not child:
            _copy(parts[first :: arguments.processes], arguments.output / str(first % arguments.files))
            os._exit(0)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        raise SystemExit("a process failed")


def _copy(parts: Sequence[tuple[Path, int, int, int]], output: Path) -> None:
    """Copy parts: path, first byte, bytes, and place in the output."""
    buffer = memoryview(bytearray(_RUN_BYTES))
    into, sums = os.open(output, os.O_WRONLY), [0, 0]
    for path, start, size, place in parts:
        source = os.open(path, os.O_RDONLY)
        for done in range(0, size, _RUN_BYTES):
            run = buffer[: min(_RUN_BYTES, size - done)]
            if os.preadv(source, [run], start + done) != len(run):
                raise OSError(f"{path} has become shorter")
            sums = [crc32(run, total) for total in sums]
            for at in range(0, len(run), _WRITE_BYTES):
                os.pwrite(into, run[at : at + _WRITE_BYTES], place + done + at)
        os.close(source)


if __name__ == "__main__":
    sys.exit(exit_status(main, "benchmarks.convert.bound"))
