"""What a conversion will take: bytes, files, memory and time, known before any weight is read.

For a checkpoint that is elsewhere, or does not exist yet, its description is enough; see ``description``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from export_scripts.checkpoints.formats import find_archive
from export_scripts.checkpoints.huggingface.quantized import stored_bytes
from export_scripts.checkpoints.user_files import NOTHING_GIVEN, GivenFiles
from export_scripts.conversion.move.assembly import Assembly, Piece
from export_scripts.conversion.plan.check import Conversion, plan_conversion
from export_scripts.conversion.plan.description import is_description, read_description
from export_scripts.conversion.plan.ranks import check_split
from export_scripts.conversion.plan.served import check_served
from export_scripts.conversion.write.shards import READ_BYTES, ShardSettings, Workspace
from export_scripts.tensors.dtypes import STORAGE, is_finite, item_bytes, recast
from ft_format.layout import TensorSpec
from handover.digests import BlockSums
from handover.progress import human_bytes, human_time

# Measured: the interpreter with numpy, and what a thread needs beside its buffer.
_BASE_BYTES, _THREAD_BYTES = 55 << 20, 6 << 20
# Rows and columns of the tensor that the rate is measured with.
_SAMPLE = 2048


@dataclass(frozen=True)
class Sizing:
    """The size of a conversion.

    Attributes:
        files_read, read_bytes: of the checkpoint.
        parameter_count: numbers in the shards, each counted once.
        files_written, written_bytes: of the FT checkpoint.
        largest: name and bytes of the largest tensor written.
        processes: tensors converted at a time, at most.
        rate: bytes that one of them rearranges, checks and digests in a second, measured here.
        buffer_bytes: read at a time by each.
    """

    files_read: int
    read_bytes: int
    parameter_count: int
    files_written: int
    written_bytes: int
    largest: tuple[str, int]
    processes: int
    rate: float
    buffer_bytes: int = READ_BYTES

    @property
    def memory_bytes(self) -> int:
        """Peak of the conversion, file pages left out."""
        return _BASE_BYTES + self.processes * (self.buffer_bytes + _THREAD_BYTES)

    def lines(self) -> list[str]:
        """Return it as text, one line a fact."""
        name, size_bytes = self.largest
        at_once_s = self.written_bytes / self.rate / self.processes
        both_bytes = self.read_bytes + self.written_bytes
        return [
            f"parameters  {self.parameter_count / 1e9:.1f} billion",
            f"reads       {human_bytes(self.read_bytes)} in {self.files_read} files",
            f"writes      {human_bytes(self.written_bytes)} in {self.files_written} files, "
            f"the largest tensor {human_bytes(size_bytes)} ({name})",
            f"memory      {human_bytes(self.memory_bytes)} with {self.processes} processes, however large the tensors",
            f"time        {human_time(at_once_s)} of {self.processes} processors at "
            f"{human_bytes(self.rate)}/s each, measured here; the storage moves {human_bytes(both_bytes)}: "
            f"{human_time(both_bytes / 1e9)} at 1 GB/s",
        ]


def processes_within(memory_bytes: float) -> int:
    """Return how many processes a conversion may have whose peak shall stay an eighth below a limit; 0: none fits."""
    return int((memory_bytes * 7 / 8 - _BASE_BYTES) // (READ_BYTES + _THREAD_BYTES))


def measure(
    path: Path, tensor_para_size: int, weight_data_type: str, processes: int, given: GivenFiles = NOTHING_GIVEN
) -> Sizing:
    """Work out the size of a conversion.

    Args:
        path: a checkpoint, or the description of one.
        tensor_para_size: ranks to split for.
        weight_data_type: fp32, fp16 or bf16.
        processes: tensors converted at a time, at most.
        given: what belongs to the checkpoint and lies elsewhere.

    Raises:
        CheckpointError: it cannot be converted.
    """
    if is_description(path):
        return _of_description(path, tensor_para_size, weight_data_type, processes)
    conversion = plan_conversion(find_archive(path, given), tensor_para_size, weight_data_type)
    sources = {key: conversion.source.tensors[key] for entry in conversion.assignments for key in entry.keys}
    types = {source.data_type for source in sources.values()}
    targets = {entry.name: entry.target for entry in conversion.assignments}
    read_bytes = sum(map(stored_bytes, sources.values()))
    small_files = len(conversion.source.tokenizer.members) + 1
    return _sizing(
        conversion.settings, targets, small_files, _weight_files(conversion), read_bytes, sorted(types)[0], processes
    )


def _weight_files(conversion: Conversion) -> int:
    names = conversion.archive.sizes
    return sum(size > READ_BYTES for size in names.values()) or len(names)


def _of_description(path: Path, tensor_para_size: int, weight_data_type: str, processes: int) -> Sizing:
    described = read_description(path)
    dims = described.dims
    check_served(described.family, dims)
    settings = ShardSettings(tensor_para_size, weight_data_type, dims)
    check_split(tensor_para_size, dims, described.family.divided)
    targets = described.family.schema(dims)
    shapes = (target.full_shape(dims) for target in described.family.tensors(dims).values())
    read_bytes = described.stored_bytes(shapes)
    return _sizing(settings, targets, 3, described.files, read_bytes, described.data_type, processes)


def _sizing(
    settings: ShardSettings,
    targets: Mapping[str, TensorSpec],
    small_files: int,
    files_read: int,
    read_bytes: int,
    source_type: str,
    processes: int,
) -> Sizing:
    ranks = {name: 1 if target.split_axis is None else settings.tensor_para_size for name, target in targets.items()}
    written = {name: settings.size_bytes(target) * ranks[name] for name, target in targets.items()}
    largest = max(written, key=lambda name: written[name])
    return Sizing(
        files_read=files_read,
        read_bytes=read_bytes,
        parameter_count=sum(written.values()) // item_bytes(settings.data_type),
        files_written=sum(ranks.values()) + small_files + 1,
        written_bytes=sum(written.values()),
        largest=(largest, written[largest]),
        processes=processes,
        rate=measured_rate(source_type, settings.data_type),
    )


def measured_rate(source_type: str, data_type: str) -> float:
    """Measure how many bytes of shards one processor makes in a second, reading and writing left out."""
    values = np.linspace(-1, 1, _SAMPLE * _SAMPLE, dtype=np.float32).reshape(_SAMPLE, _SAMPLE)
    weight = recast(values, "fp32", source_type)
    box = Assembly(weight.shape, ((Piece(weight.T, source_type, (0, 0)),),))
    workspace, rows, durations_s = Workspace(set()), _SAMPLE // 8, []
    for start in (*range(0, _SAMPLE, rows), 0):
        started = time.perf_counter()
        block = box.cropped(0, start, start + rows).values(data_type, workspace.block, workspace.transposer)
        is_finite(block, data_type)
        BlockSums().update(block.reshape(-1).view(np.uint8).data)
        durations_s.append(time.perf_counter() - started)
    return rows * _SAMPLE * STORAGE[data_type].itemsize / sorted(durations_s)[len(durations_s) // 2]
