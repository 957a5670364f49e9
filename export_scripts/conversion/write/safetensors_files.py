"""Write safetensors files in parts that several processes write side by side.

Every part is written at its own place, digested and noted in the journal, so that a killed conversion continues within
a file of gigabytes. A file has another name until all of it is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from export_scripts.conversion.move.assembly import Assembly
from export_scripts.conversion.write.copied_bytes import contents
from export_scripts.conversion.write.journal import Journal, PartRecord, QuantizationRecord
from export_scripts.conversion.write.late_writes import LateWrites, Turn
from export_scripts.conversion.write.quantized_bytes import quantized_contents
from export_scripts.conversion.write.room import NO_ROOM, Room
from export_scripts.conversion.write.safetensors_layout import Part, Rows, WeightsFile
from export_scripts.conversion.write.shard_file import full_disk_explained
from export_scripts.conversion.write.shards import ShardSettings, Workspace, tensor_named
from handover.digests import BlockSums, SummedRange, joined_digest
from handover.durable import begin_sync
from handover.manifest import FileRecord

_READ_TOGETHER = 16  # tensors whose checksums are compared together


def begin_file(root: Path, file: WeightsFile, data_type: str, journal: Journal, room: Room = NO_ROOM) -> None:
    """Make a file with its header and the room for its tensors, unless parts of it are there already.

    It is a hard link where it has an origin on the same file system; the first that is none takes ``room``.
    """
    path = root / file.growing
    if any(name == file.growing for name, _ in journal.parts):
        return
    path.unlink(missing_ok=True)  # a killed run's link: whoever wrote to it would write to the origin
    if file.origin is not None:
        with suppress(OSError):
            os.link(file.origin.resolve(), path)
            return
    with full_disk_explained(path), path.open("r+b" if room.take(path, file.size_bytes) else "wb") as stream:
        stream.write(file.header(data_type))
        stream.truncate(file.size_bytes)


def write_part(
    part: Part,
    root: Path,
    settings: ShardSettings,
    journal: Journal,
    workspace: Workspace,
    advance: Callable[[int], None],
    turn: Turn,
) -> tuple[list[PartRecord], list[QuantizationRecord]]:
    """Write a part at its place, unless the journal says that it is there; of a linked file it is read and checked.

    Args:
        part: to write.
        root: the output directory.
        settings: the data type, and whether what is not finite may be written.
        journal: of that directory.
        workspace: of this process.
        advance: told the bytes written, now and then.
        turn: at writing to the file.

    Returns:
        What was written, and what quantizing it has cost; the latter is empty if it was there.

    Raises:
        CheckpointError: a value is NaN, infinite or too large for the data type, or the source is damaged.
        ArtefactError: the disk is full.
    """
    path = root / part.file.growing
    finished = [journal.parts.get((path.name, begin)) for begin, _ in part.spans]
    if all(finished):
        return [record for record in finished if record], []
    is_linked = part.file.is_linked(root)
    costs: list[QuantizationRecord] = []
    read = _Read(workspace)
    stream = (content for rows in part.rows for content in _contents(rows, settings, workspace, costs, read))
    records = []
    descriptor = os.open(path, os.O_RDONLY if is_linked else os.O_WRONLY)
    writes = LateWrites(descriptor, turn, workspace.kept)
    try:
        for begin, end in part.spans:
            sums, offset = BlockSums(begin), begin
            while offset < end:
                content = next(stream)
                sums.update(content)
                advance(len(content))
                if not is_linked:
                    with full_disk_explained(path):
                        writes.write(content, offset)
                offset += len(content)
            assert offset == end, f"{offset} is not the end of {part.rows[-1].tensor.name}"
            if not is_linked:
                with full_disk_explained(path):
                    writes.finish()
                begin_sync(descriptor, begin, end - begin)
            records.append(PartRecord(path.name, begin, end - begin, sums.sums().hex()))
        assert next(stream, None) is None, f"{part.rows[-1].tensor.name} has more bytes than its place"
        read.verify()
    finally:
        os.close(descriptor)
    for cost in costs:
        journal.add(cost)
    for record in records:
        journal.add(record)
    return records, costs


def _contents(
    rows: Rows, settings: ShardSettings, workspace: Workspace, costs: list[QuantizationRecord], read: _Read
) -> Iterator[memoryview]:
    """Yield the bytes of rows, checked, a little at a time; add what quantizing them has cost."""
    tensor = rows.tensor
    with tensor_named(tensor.name):
        whole = tensor.make()
        box = whole.cropped(0, rows.start, rows.stop)
        if tensor.quantization is None:
            own = replace(settings, data_type=tensor.data_type(settings.data_type))
            yield from contents(box, tensor.name, own, workspace)
        else:
            costs.append((yield from quantized_contents(rows, box, tensor.quantization, settings, workspace)))
    if rows.stop - rows.start == whole.shape[0]:
        read.add(tensor.name, whole)


class _Read:
    """Tensors that were read as a whole; records that several of them share are summed up when all have been.

    Query, key and value of a layer are one record of many, and follow one another.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._tensors: list[tuple[str, Assembly]] = []

    def add(self, name: str, tensor: Assembly) -> None:
        """Compare the checksums of a tensor's records, now or soon."""
        self._tensors.append((name, tensor))
        if len(self._tensors) == _READ_TOGETHER:
            self.verify()

    def verify(self) -> None:
        """Compare those that were not compared yet.

        Raises:
            CheckpointError: a record is damaged.
        """
        for name, tensor in self._tensors:
            with tensor_named(name):
                tensor.verify(self._workspace.reader)
        self._tensors.clear()


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
