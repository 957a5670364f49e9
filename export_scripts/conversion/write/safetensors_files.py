"""Write tensors as safetensors files of a limited size, in parts that several processes write side by side.

Format: https://github.com/huggingface/safetensors, "Format". A file's header is known before any weight is read, and
with it where each tensor lies: every part is written at its own place, digested and noted in the journal, so that a
killed conversion continues within a file of gigabytes. A file has another name until all of it is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

from export_scripts.conversion.move.assembly import Assembly
from export_scripts.conversion.write.copied_bytes import contents
from export_scripts.conversion.write.journal import GROWING, Journal, PartRecord
from export_scripts.conversion.write.shard_file import full_disk_explained, write_at
from export_scripts.conversion.write.shards import ShardSettings, Workspace, tensor_named
from export_scripts.tensors.dtypes import item_bytes
from export_scripts.weights.schema import Shape
from handover.digests import BlockSums, SummedRange, joined_digest
from handover.durable import begin_sync
from handover.manifest import FileRecord

LARGEST_FILE_BYTES = 5 * 10**9
INDEX_FILE = "model.safetensors.index.json"
_NAMES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_ALIGNMENT = 8
PART_BYTES = 64 << 20
"""Written by one process at a time: enough to share the work of a file, and few lines of the journal."""


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to write.

    Attributes:
        name: in the file.
        shape: in the file's header.
        axes: shape of what ``make`` gives; neighbouring axes may be one in ``shape``.
        make: puts it together from its sources; nothing is read.
        is_cut: whether several processes may make a part each: its sources have no checksums that need all of it.
    """

    name: str
    shape: Shape
    axes: Shape
    make: Callable[[], Assembly]
    is_cut: bool = False


@dataclass(frozen=True)
class WeightsFile:
    """One file of weights, laid out.

    Attributes:
        name: its own.
        header: its first bytes.
        tensors: in the order of their bytes.
        offsets: of each tensor's first byte in the file.
        size_bytes: of the file.
        origin: a file with these very bytes, of which this one is a hard link where the file system has them; None:
            there is none.
    """

    name: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]
    offsets: tuple[int, ...]
    size_bytes: int
    origin: Path | None = None

    @property
    def growing(self) -> str:
        """Name of the file until it is whole."""
        return self.name + GROWING

    def is_linked(self, root: Path) -> bool:
        """Whether the growing file in a directory is the origin under another name: it must not be written to."""
        return self.origin is not None and (root / self.growing).samefile(self.origin)


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor, along its first axis.

    Attributes:
        tensor: whose.
        start, stop: of the rows; the whole tensor has ``start`` 0 and ``stop`` the number of its rows.
    """

    tensor: PlannedTensor
    start: int
    stop: int


@dataclass(frozen=True)
class Part:
    """Bytes of a file that one process writes.

    Attributes:
        file: to write to.
        offset, size_bytes: of the part in the file.
        rows: what it consists of, in the order of the bytes.
    """

    file: WeightsFile
    offset: int
    size_bytes: int
    rows: tuple[Rows, ...]


def lay_out(tensors: Sequence[PlannedTensor], data_type: str, largest_bytes: int) -> tuple[WeightsFile, ...]:
    """Share tensors out among files, in their order; a tensor that is larger than a file may be has its own.

    Args:
        tensors: to write.
        data_type: fp32, fp16 or bf16.
        largest_bytes: of a file's tensors.
    """
    groups: list[list[PlannedTensor]] = [[]]
    used_bytes = 0
    for tensor in tensors:
        size_bytes = prod(tensor.shape) * item_bytes(data_type)
        if groups[-1] and used_bytes + size_bytes > largest_bytes:
            groups.append([])
            used_bytes = 0
        groups[-1].append(tensor)
        used_bytes += size_bytes
    if len(groups) == 1:
        return (file_of("model.safetensors", groups[0], data_type),)
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    return tuple(file_of(name, group, data_type) for name, group in zip(names, groups, strict=True))


def file_of(name: str, tensors: Sequence[PlannedTensor], data_type: str) -> WeightsFile:
    """Lay tensors out in one file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = [], 0
    for tensor in tensors:
        begins.append(end)
        end += prod(tensor.shape) * item_bytes(data_type)
        entries[tensor.name] = {
            "dtype": _NAMES[data_type],
            "shape": list(tensor.shape),
            "data_offsets": [begins[-1], end],
        }
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    header = len(content).to_bytes(8, "little") + content
    return WeightsFile(name, header, tuple(tensors), tuple(len(header) + begin for begin in begins), len(header) + end)


def index_of(files: Sequence[WeightsFile]) -> bytes:
    """Render the index of several files."""
    total = sum(file.size_bytes - len(file.header) for file in files)
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()


def parts_of(file: WeightsFile, data_type: str) -> Iterator[Part]:
    """Cut a file into parts: some small tensors each, or some rows of a large one."""
    rows: list[Rows] = []
    begin, end = len(file.header), len(file.header)
    for tensor in file.tensors:
        count = tensor.axes[0]
        row_bytes = prod(tensor.axes[1:]) * item_bytes(data_type)
        most = max(1, PART_BYTES // max(1, row_bytes)) if tensor.is_cut else count
        for start in range(0, count, max(1, most)):
            stop = min(start + most, count)
            rows.append(Rows(tensor, start, stop))
            end += (stop - start) * row_bytes
            if end - begin >= PART_BYTES:
                yield Part(file, begin, end - begin, tuple(rows))
                begin, rows = end, []
    if rows:
        yield Part(file, begin, end - begin, tuple(rows))


def begin_file(root: Path, file: WeightsFile, journal: Journal) -> None:
    """Make a file with its header and the room for its tensors, unless parts of it are there already.

    It is a hard link where it has an origin on the same file system.
    """
    path = root / file.growing
    if any(name == file.growing for name, _ in journal.parts):
        return
    path.unlink(missing_ok=True)  # a killed run's link: whoever wrote to it would write to the origin
    if file.origin is not None:
        with suppress(OSError):
            os.link(file.origin.resolve(), path)
            return
    with full_disk_explained(path), path.open("wb") as stream:
        stream.write(file.header)
        stream.truncate(file.size_bytes)


def write_part(
    part: Part,
    root: Path,
    settings: ShardSettings,
    journal: Journal,
    workspace: Workspace,
    advance: Callable[[int], None],
) -> PartRecord:
    """Write a part at its place, unless the journal says that it is there; of a linked file it is read and checked.

    Args:
        part: to write.
        root: the output directory.
        settings: the data type, and whether what is not finite may be written.
        journal: of that directory.
        workspace: of this process.
        advance: told the bytes written, now and then.

    Raises:
        CheckpointError: a value is NaN, infinite or too large for the data type, or the source is damaged.
        ArtefactError: the disk is full.
    """
    path = root / part.file.growing
    if finished := journal.parts.get((path.name, part.offset)):
        return finished
    sums, offset, is_linked = BlockSums(part.offset), part.offset, part.file.is_linked(root)
    descriptor = os.open(path, os.O_RDONLY if is_linked else os.O_WRONLY)
    try:
        for rows in part.rows:
            for content in _contents(rows, settings, workspace):
                sums.update(content)
                advance(len(content))
                if not is_linked:
                    with full_disk_explained(path):
                        write_at(descriptor, content, offset)
                offset += len(content)
        if not is_linked:
            begin_sync(descriptor, part.offset, part.size_bytes)
    finally:
        os.close(descriptor)
    assert offset == part.offset + part.size_bytes, f"{offset} is not the end of {part.rows[-1].tensor.name}"
    record = PartRecord(path.name, part.offset, part.size_bytes, sums.sums().hex())
    journal.add(record)
    return record


def _contents(rows: Rows, settings: ShardSettings, workspace: Workspace) -> Iterator[memoryview]:
    """Yield the bytes of rows, checked, a little at a time."""
    tensor = rows.tensor
    with tensor_named(tensor.name):
        whole = tensor.make()
        box = whole.cropped(0, rows.start, rows.stop)
        yield from contents(box, tensor.name, settings, workspace)
        if rows.stop - rows.start == whole.shape[0]:
            whole.verify(workspace.reader)


def publish(root: Path, file: WeightsFile, parts: Sequence[PartRecord], journal: Journal) -> FileRecord:
    """Digest a file whose parts are all written, note it in the journal and give it its name.

    Only blocks that two parts share, or that the header is in, are read once more.
    """
    path = root / file.growing
    ranges = (SummedRange(part.offset, part.size_bytes, bytes.fromhex(part.sums)) for part in parts)
    record = FileRecord(file.name, file.size_bytes, joined_digest(path, ranges))
    journal.add(record)
    os.replace(path, root / file.name)
    return record
