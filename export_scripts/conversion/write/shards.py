"""Write tensors as FasterTransformer's shards: split, cast, raw little-endian bytes, digested as they are written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from export_scripts.conversion.move.assembly import Assembly
from export_scripts.conversion.move.joining import side_by_side
from export_scripts.conversion.move.kv_copies import with_copies
from export_scripts.conversion.move.placement import assemble
from export_scripts.conversion.move.transposition import Transposer
from export_scripts.conversion.write.journal import Journal
from export_scripts.conversion.write.late_writes import ROOM_BYTES
from export_scripts.conversion.write.shard_file import ShardFile
from export_scripts.tensors.dtypes import Array, Census, is_finite, item_bytes
from export_scripts.tensors.mapped import Reader, RecordKey
from export_scripts.tensors.read_sums import ReadSums
from export_scripts.weights.schema import Assignment, LazyTensor
from ft_format.layout import Dims, TensorSpec
from handover.errors import ArtefactError, CheckpointError
from handover.manifest import FileRecord
from handover.progress import human_bytes

# Read at a time: a thread's whole buffer. Large, so that the columns of a transposed tensor are read in long runs.
READ_BYTES = 32 << 20
# Rearranged, checked, digested and written at a time: it stays in the cache from one step to the next.
_BLOCK_BYTES = 2 << 20


@dataclass(frozen=True)
class ShardSettings:
    """How tensors become files.

    Attributes:
        tensor_para_size: ranks that a split tensor is cut for.
        data_type: fp32, fp16 or bf16, on disk.
        dims: of the model; those of its files may differ.
        allow_nonfinite: NaN and infinity are converted as they are; a number that overflows never is.
    """

    tensor_para_size: int
    data_type: str
    dims: Dims
    allow_nonfinite: bool = False

    @property
    def file_dims(self) -> Dims:
        """Dimensions that config.ini says, and that the files have."""
        return self.dims.for_ranks(self.tensor_para_size)

    def shape(self, target: TensorSpec) -> tuple[int, ...]:
        """Shape of one file of a target."""
        return target.shard_shape(self.file_dims, self.tensor_para_size)

    def size_bytes(self, target: TensorSpec) -> int:
        """Bytes of one file of a target."""
        return prod(self.shape(target)) * item_bytes(self.data_type)

    def split_axis(self, target: TensorSpec) -> int | None:
        """Axis of the whole tensor, inner structure spelled out, along which it is cut; None: it is not."""
        if target.split_axis is None:
            return None
        return sum(len(axis) if isinstance(axis, tuple) else 1 for axis in target.shape[: target.split_axis])

    def file_names(self, assignment: Assignment) -> tuple[str, ...]:
        """Files of a target, in the order of ranks."""
        if assignment.target.split_axis is None:
            return (f"{assignment.name}.bin",)
        return tuple(f"{assignment.name}.{rank}.bin" for rank in range(self.tensor_para_size))


def check_space(directory: Path, needed_bytes: int) -> None:
    """Refuse to start what cannot end.

    Raises:
        ArtefactError: the file system has less room than is needed.
    """
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise ArtefactError(
            f"{directory} has {human_bytes(free_bytes)} free and {human_bytes(needed_bytes)} are needed",
            "free some space or choose another base_results_dir",
        )


@contextmanager
def tensor_named(name: str) -> Iterator[None]:
    """Add to an error of the source which tensor was being made."""
    try:
        yield
    except CheckpointError as error:
        if name in error.problem:
            raise
        raise CheckpointError(f"{name}: {error.problem}", error.hint) from error


class Workspace:
    """The memory of one thread: everything that a conversion holds of the weights at a time.

    Args:
        verified: records whose checksums were compared; the threads share it.
        sums_reads: whether ``read_sums`` takes note of all that is read.
    """

    def __init__(self, verified: set[RecordKey], sums_reads: bool = False) -> None:
        self.read_sums = ReadSums()
        self.reader = Reader(READ_BYTES, verified, self.read_sums if sums_reads else None)
        self.transposer = Transposer()
        self.block = np.empty(_BLOCK_BYTES, np.uint8)
        self.kept = np.empty(ROOM_BYTES, np.uint8).data


def check_values(
    assignment: Assignment, sources: Sequence[LazyTensor], settings: ShardSettings, workspace: Workspace
) -> None:
    """Read what a target is made from and make sure that all of it is finite in its data type.

    Raises:
        CheckpointError: a value is NaN, infinite or too large for the data type, or the file is damaged.
    """
    with tensor_named(assignment.name):
        assembly = assemble(assignment, sources, settings.dims)
        for _ in blocks(assembly, assembly.shape[0], assignment.name, settings, workspace):
            pass
        assembly.verify(workspace.reader)


def write_tensor(
    assignment: Assignment,
    sources: Sequence[LazyTensor],
    settings: ShardSettings,
    root: Path,
    journal: Journal,
    workspace: Workspace,
    advance: Callable[[int], None] = lambda size_bytes: None,
) -> list[FileRecord]:
    """Write the shards of one target that are not finished yet; returns the records of all of them.

    Args:
        assignment: what to write.
        sources: the tensors that it is made from.
        settings: how tensors become files.
        root: the output directory.
        journal: of that directory.
        workspace: of this thread.
        advance: told the bytes written, now and then.

    Raises:
        CheckpointError: a value is NaN, infinite or too large for the data type, or the source is damaged.
        ArtefactError: the disk is full.
    """
    names = settings.file_names(assignment)
    missing = [rank for rank, name in enumerate(names) if name not in journal.finished]
    records = [journal.finished[name] for name in names if name in journal.finished]
    if not missing:
        return records
    shape = settings.shape(assignment.target)
    with ExitStack() as stack, tensor_named(assignment.name):
        assemblies = _assemblies(assignment, sources, settings)
        files = {
            rank: stack.enter_context(ShardFile(root / names[rank], shape, settings.data_type)) for rank in missing
        }
        for ranks, box in _boxes(assemblies, settings.split_axis(assignment.target), len(names), missing):
            rows = box.shape[0] // len(ranks)
            for row, values in blocks(box, rows, assignment.name, settings, workspace):
                files[ranks[row // rows]].write(values)
                advance(values.nbytes)
        for assembly in assemblies:
            assembly.verify(workspace.reader)
        records += [file.publish(journal) for file in files.values()]
    return records


def write_bytes(path: Path, content: bytes, journal: Journal) -> FileRecord:
    """Write a small file as shards are written: digested, noted in the journal, all or nothing."""
    with ShardFile(path) as file:
        file.write(np.frombuffer(content, np.uint8))
        return file.publish(journal)


def _assemblies(assignment: Assignment, sources: Sequence[LazyTensor], settings: ShardSettings) -> tuple[Assembly, ...]:
    """Assemble the tensors of a file, mostly one."""
    given, assemblies = iter(sources), []
    for part in assignment.parts or (assignment,):
        box = assemble(part, [next(given) for _ in part.keys], settings.dims)
        assemblies.append(with_copies(box, part.target, settings.dims, settings.tensor_para_size))
    return tuple(assemblies)


def _boxes(
    assemblies: Sequence[Assembly], axis: int | None, ranks: int, missing: Sequence[int]
) -> Iterator[tuple[Sequence[int], Assembly]]:
    """Cut a target into boxes whose rows are those of one or more ranks' files, one after another.

    Where the ranks divide the first axis, those that follow one another are read together: their columns of a
    transposed source lie side by side. Of several tensors each rank has its part of one behind that of another.
    """
    assembly = assemblies[0]
    if axis is None:
        yield missing, assembly
        return
    if len(assemblies) > 1:
        for rank in missing:
            sizes = [each.shape[axis] // ranks for each in assemblies]
            shares = [each.cropped(axis, rank * n, (rank + 1) * n) for each, n in zip(assemblies, sizes, strict=True)]
            yield [rank], side_by_side(shares, axis)
        return
    size = assembly.shape[axis] // ranks
    groups: list[list[int]] = []
    for rank in missing:
        if axis == 0 and groups and groups[-1][-1] == rank - 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    for group in groups:
        yield group, assembly.cropped(axis, group[0] * size, (group[-1] + 1) * size)


def blocks(
    box: Assembly,
    rows_per_file: int,
    name: str,
    settings: ShardSettings,
    workspace: Workspace,
    together: int = 1,
    axis: int = 0,
    is_checked: bool = True,
) -> Iterator[tuple[int, Array]]:
    """Read a box in large pieces along its first axis, and give its rows, cast and checked, in small ones.

    Blocks begin at multiples of ``together`` rows. With ``axis`` 1 a box of one row is given by that row's own rows.
    Unless ``is_checked``, whoever takes the values looks for what is not finite.

    Yields:
        The first row and the values of a block, which never goes beyond the end of a file.
    """
    total = box.shape[axis]
    # What is not rearranged is read a little at a time: it stays in the cache until it is written.
    most_bytes = _BLOCK_BYTES if box.is_plain else READ_BYTES // (axis + 1)
    read_rows = _multiple(_even(total, max(1, most_bytes * total // max(1, box.row_bytes * box.shape[0]))), together)
    row_bytes = prod(box.shape[axis + 1 :]) * item_bytes(settings.data_type)
    write_rows = _multiple(max(1, _BLOCK_BYTES // max(1, row_bytes)), together)
    for start in range(0, total, read_rows):
        stop = min(start + read_rows, total)
        loaded = box.cropped(axis, start, stop).loaded(workspace.reader)
        row = start
        while row < stop:
            end = min(row + write_rows, stop, (row // rows_per_file + 1) * rows_per_file)
            block = loaded.cropped(axis, row - start, end - start)
            values = block.values(settings.data_type, workspace.block, workspace.transposer)
            if is_checked and not is_finite(values, settings.data_type):
                _refuse(block, box, name, settings, workspace)
            yield row, values
            row = end


def _even(total: int, most: int) -> int:
    """Divide rows into equal runs of at most that many."""
    return -(-total // -(-total // most))


def _multiple(rows: int, together: int) -> int:
    """Return a multiple that is hardly larger."""
    return -(-rows // together) * together


def _refuse(block: Assembly, box: Assembly, name: str, settings: ShardSettings, workspace: Workspace) -> None:
    """Raise for a block that is not finite in its data type, unless its source is not finite and may be so."""
    census = Census()
    census.add(block.values("fp32", np.empty(0, np.uint8), workspace.transposer), block.origin)
    if settings.allow_nonfinite and not census.overflows(settings.data_type):
        return
    raise nonfinite_error(box, block.shape[0], name, settings, workspace)


def nonfinite_error(
    box: Assembly, rows: int, name: str, settings: ShardSettings, workspace: Workspace
) -> CheckpointError:
    """Read a box once more, some rows at a time, and say how much of it is not finite in its data type."""
    census, apart = Census(), np.empty(0, np.uint8)  # values that the workspace holds stay where they are
    for start in range(0, box.shape[0], rows):
        part = box.cropped(0, start, min(start + rows, box.shape[0])).loaded(workspace.reader)
        census.add(part.values("fp32", apart, workspace.transposer), part.origin)
    return census.error(name, settings.data_type)
