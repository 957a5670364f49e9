"""Convert a checkpoint into a directory that transformers loads: configuration, safetensors, tokenizer, manifest."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.digests import crc32_of
from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.formats import find_archive
from export_scripts.checkpoints.tokenizers.vocabularies import forget_tokens
from export_scripts.conversion.job import (
    SPARE_BYTES,
    check_apart,
    check_signed,
    check_unchanged,
    finish,
    given_files,
    interrupts_say,
    mappable,
    origin,
    prove,
    workers_of,
)
from export_scripts.conversion.write.journal import Journal, PartRecord, QuantizationRecord
from export_scripts.conversion.write.room import NO_ROOM, Room
from export_scripts.conversion.write.safetensors_files import begin_file, publish, write_part
from export_scripts.conversion.write.safetensors_layout import (
    LARGEST_FILE_BYTES,
    Part,
    WeightsFile,
    part_bytes,
    parts_of,
)
from export_scripts.conversion.write.shards import Workspace, check_space, write_bytes
from export_scripts.conversion.write.workers import Advance, run_all, turns
from export_scripts.quantization.groups import library
from export_scripts.targets.huggingface.plan import HuggingFacePlan, Wish, plan_huggingface
from export_scripts.targets.huggingface.quantized import find_quantization, report
from export_scripts.tensors.dtypes import STORAGE
from export_scripts.tensors.mapped import RecordKey
from export_scripts.tensors.read_sums import FileRange, by_path
from handover.digests import SummedRange
from handover.errors import CheckpointError, nearest
from handover.manifest import QUANTIZED, FileRecord, Manifest
from handover.progress import Progress
from handover.signatures.sealing import Seal

KIND = "huggingface"
# Written into the journal: work of an older layout is not continued.
_LAYOUT_VERSION = 3
_KEPT = 2  # files of which a process keeps the parts: it seldom has to take another's


def convert_to_huggingface(arguments: ConvertArguments, seal: Seal, room: Room = NO_ROOM) -> Manifest:
    """Convert a checkpoint and write the manifest last.

    Args:
        arguments: of the conversion.
        seal: signs it.
        room: for the first file.

    Raises:
        CheckpointError: the checkpoint cannot be converted; see ``plan_huggingface``.
        ArtefactError: the disk is full or the output directory holds foreign files.
    """
    wish = wish_of(arguments)
    archive = find_archive(arguments.checkpoint, given_files(arguments))
    check_apart(archive, arguments.output)
    check_signed(seal, archive, arguments)
    plan = plan_huggingface(archive, replace(wish, asks_nemo=True))
    made_from = {
        **origin(archive, plan.source.source_map.name, arguments),
        "format": KIND,
        "largest_file_bytes": wish.largest_file_bytes,
        **({"quantization": wish.quantization.name} if wish.quantization else {}),
    }
    del made_from["tensor_para_size"]
    if wish.quantization:
        library()
    sys.stderr.write(f"convert: note: {plan.source.source_map.name}, for transformers' {plan.architecture}\n")
    return write_directory(
        KIND, plan, archive, made_from, arguments, seal, lambda unpacked: plan_huggingface(unpacked, wish), room
    )


def write_directory(
    kind: str,
    plan: HuggingFacePlan,
    archive: Archive,
    made_from: dict[str, object],
    arguments: ConvertArguments,
    seal: Seal,
    plan_again: Callable[[Archive], HuggingFacePlan],
    room: Room = NO_ROOM,
) -> Manifest:
    """Write what is planned, and the manifest last.

    Args:
        kind: of the directory, for its manifest.
        plan: of it.
        archive: what its bytes are from.
        made_from: for the manifest and the journal.
        arguments: of the conversion.
        seal: signs it.
        plan_again: plans it for the same files, unpacked.
        room: for the first file.

    Raises:
        CheckpointError: the source is damaged, or was changed meanwhile.
        ArtefactError: the disk is full or the output directory holds foreign files.
    """
    journal = Journal(arguments.output, {**made_from, "layout_version": _LAYOUT_VERSION}, plan.names())
    try:
        _check_space(plan, arguments.output, journal, room)
        for remark in plan.remarks:
            sys.stderr.write(f"convert: note: {remark}\n")
        proof = prove(archive, plan.read, arguments)
        with mappable(archive, arguments.output) as unpacked:
            mapped = plan if unpacked is archive else plan_again(unpacked)
            forget_tokens()
            records, read = _write_weights(mapped, arguments.output, journal, arguments.processes, not proof, room)
        records += [
            write_bytes(arguments.output / name, content, journal) for name, content in plan.small_files.items()
        ]
        check_unchanged(archive, made_from)
    finally:
        journal.close()
    made_from |= proof or {"checkpoint_digest": crc32_of(archive, workers_of(arguments.processes), read)}
    if journal.costs:
        made_from[QUANTIZED] = report(journal.costs.values())
    manifest = Manifest(kind, tuple(sorted(records, key=lambda record: record.path)), made_from)
    finish(seal, manifest, archive, arguments)
    journal.remove()
    return manifest


def inspect_huggingface(path: Path, arguments: ConvertArguments) -> HuggingFacePlan:
    """Check that a checkpoint can be converted, as the conversion will; nothing is written.

    Raises:
        CheckpointError: it cannot; see ``plan_huggingface``.
    """
    return plan_huggingface(find_archive(path, given_files(arguments)), wish_of(arguments))


def wish_of(arguments: ConvertArguments) -> Wish:
    """Read what is asked for.

    Raises:
        CheckpointError: weights of a data type or a quantization that is not written, or that are made up.
    """
    if arguments.random_weights:
        raise CheckpointError(
            "random weights are made for FasterTransformer's shards alone", "leave export.model.format out"
        )
    if arguments.weight_data_type not in STORAGE:
        raise CheckpointError(
            f"weight_data_type '{arguments.weight_data_type}' is unknown", nearest(arguments.weight_data_type, STORAGE)
        )
    return Wish(
        arguments.weight_data_type,
        arguments.largest_file_bytes or LARGEST_FILE_BYTES,
        arguments.allow_nonfinite,
        arguments.start_id,
        arguments.end_id,
        quantization=find_quantization(arguments.quantization, arguments.allow_nonfinite),
    )


def _check_space(plan: HuggingFacePlan, output: Path, journal: Journal, room: Room) -> None:
    written = {name: part.size_bytes for (name, _), part in journal.parts.items()}
    needed_bytes = SPARE_BYTES + sum(map(len, plan.small_files.values()))
    for file in plan.files:
        if file.name not in journal.finished:
            is_linked = file.origin is not None and file.origin.stat().st_dev == output.stat().st_dev
            needed_bytes += 0 if is_linked else file.size_bytes - written.get(file.growing, 0)
    if plan.source.archive.is_compressed:
        needed_bytes += sum(plan.source.archive.sizes.values())
    check_space(output, needed_bytes - room.stop())


@dataclass
class _Growing:
    """A file of weights on its way: how many of its spans are still to come, and those that are there."""

    file: WeightsFile
    left: int
    parts: list[PartRecord]


class _Parts:
    """The parts of all files, in an order in which each process writes to a file of its own, where there are as many.

    The kernel lets one process at a time write to a file.

    Attributes:
        places: file and number in it of each part, in the order in which they are written.
        spans: how many each file has, in the order of the files.
    """

    def __init__(self, files: Sequence[WeightsFile], data_type: str, processes: int, size_bytes: int) -> None:
        self._files, self._data_type, self._each_bytes = files, data_type, size_bytes
        self._own: dict[int, list[Part]] = {}
        self.size_bytes, self.spans = 0, array("L")
        places, keys = array("L"), array("L")
        for number, file in enumerate(files):
            self.spans.append(0)
            for index, part in enumerate(parts_of(file, data_type, size_bytes)):
                self.size_bytes += part.size_bytes
                self.spans[-1] += len(part.spans)
                places.extend((number, index))
                keys.append(part.size_bytes // (2 * size_bytes))

        def order(number: int) -> tuple[int, int, int]:
            file, index = places[2 * number : 2 * number + 2]
            # Those that cannot be cut and are large come first, so that no process is left with one at the end.
            return -keys[number], file // processes, index

        self.places = [(places[2 * number], places[2 * number + 1]) for number in sorted(range(len(keys)), key=order)]

    def part(self, number: int) -> Part:
        """Make one."""
        file, index = self.places[number]
        if file not in self._own:
            if len(self._own) == _KEPT:
                self._own.clear()
            self._own[file] = list(parts_of(self._files[file], self._data_type, self._each_bytes))
        return self._own[file][index]


Written = tuple[list[PartRecord], list[QuantizationRecord]]


def _write_weights(
    plan: HuggingFacePlan, output: Path, journal: Journal, processes: int, sums_reads: bool, room: Room
) -> tuple[list[FileRecord], Mapping[str, Sequence[SummedRange]]]:
    """Write all files of weights, part by part; each gets its name when its last part is there.

    Returns:
        The files' records; and, if ``sums_reads``, what was read of the checkpoint with its checksums, by path.

    Raises:
        KeyboardInterrupt: with how far it came.
    """
    verified, data_type = set[RecordKey](), plan.settings.data_type
    files = [file for file in plan.files if file.name not in journal.finished]
    records = [journal.finished[file.name] for file in plan.files if file.name in journal.finished]
    parts = _Parts(files, data_type, workers_of(processes), part_bytes(plan.files))
    growing = {file.name: _Growing(file, spans, []) for file, spans in zip(files, parts.spans, strict=True)}
    for file in files:
        begin_file(output, file, data_type, journal, room)
    room.close()
    workspaces: list[Workspace] = []  # one in each process, made where it is used
    ranges: list[FileRange] = []
    own = turns(workers_of(processes), 2 * workers_of(processes))  # files that are written at a time are neighbours

    def write(number: int, advance: Advance) -> tuple[str, Written, list[FileRange]]:
        if not workspaces:
            workspaces.append(Workspace(verified, sums_reads))
        part, workspace, turn = parts.part(number), workspaces[0], own[parts.places[number][0] % len(own)]
        written = write_part(part, output, plan.settings, journal, workspace, advance, turn)
        return part.file.name, written, workspace.read_sums.taken()

    with (
        interrupts_say(lambda: f"{len(records)} of {len(plan.files)} files", records),
        Progress("convert", len(files), "files", parts.size_bytes) as progress,
    ):
        progress.skip(sum(part.size_bytes for part in journal.parts.values()))
        for name, (written, costs), read in run_all(
            workers_of(processes), len(parts.places), write, lambda size_bytes: progress.advance(0, size_bytes)
        ):
            ranges += read
            journal.costs |= {(cost.tensor, cost.row): cost for cost in costs}
            one = growing[name]
            one.left -= len(written)
            one.parts += written
            if not one.left:
                records.append(publish(output, one.file, one.parts, journal))
                del growing[name]
                progress.advance(1)
    return records, by_path(ranges)
