"""Convert a checkpoint into FasterTransformer's shards.

Tensors are mapped out of the archive one at a time, rearranged, split, cast and written with their digests in one
pass. A killed conversion continues where it stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.digests import crc32_of
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.chat import find_chat
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
from export_scripts.conversion.plan.check import Conversion, plan_conversion
from export_scripts.conversion.plan.nemo_ids import with_nemos_ids
from export_scripts.conversion.plan.random_weights import plan_random
from export_scripts.conversion.plan.special_ids import with_settled_ids
from export_scripts.conversion.write.journal import Journal
from export_scripts.conversion.write.shards import Workspace, check_space, write_bytes, write_tensor
from export_scripts.conversion.write.workers import Advance, run_all
from export_scripts.tensors.mapped import RecordKey
from export_scripts.tensors.read_sums import FileRange, by_path
from ft_format.config_ini import FILE_NAME as CONFIG_INI
from ft_format.config_ini import Sections
from ft_format.families.family import EXACT_GELU, ConfigValues, render_config
from handover.digests import SummedRange
from handover.manifest import RANDOM_WEIGHTS, FileRecord, Manifest
from handover.progress import Progress
from handover.signatures.sealing import Seal

# Written into the journal: work of an older layout is not continued.
_LAYOUT_VERSION = 2


def convert_to_shards(arguments: ConvertArguments, seal: Seal) -> Manifest:
    """Convert a checkpoint and write the manifest last.

    Raises:
        CheckpointError: the checkpoint cannot be converted; see ``check.inspect_source``.
        ArtefactError: the disk is full or the output directory holds foreign files.
    """
    conversion = _plan(arguments)
    archive = conversion.archive
    check_apart(archive, arguments.output)
    check_signed(seal, archive, arguments)
    made_from = origin(archive, conversion.source.source_map.name, arguments)
    journal = Journal(arguments.output, {**made_from, "layout_version": _LAYOUT_VERSION}, _names(conversion))
    try:
        _check_space(conversion, arguments.output, journal)
        named, nemos_remark = with_nemos_ids(conversion.source)
        source = with_settled_ids(named, arguments.start_id, arguments.end_id)
        conversion = replace(conversion, source=source)
        sys.stderr.write(f"convert: note: {source.source_map.name}, for FasterTransformer's {source.family.name}\n")
        for remark in (*source.remarks, *filter(None, (nemos_remark,))):
            sys.stderr.write(f"convert: note: {remark}\n")
        read = [each for assignment in conversion.assignments for each in conversion.sources(assignment)]
        proof = {RANDOM_WEIGHTS: True} if arguments.random_weights else prove(archive, read, arguments)
        with mappable(archive, arguments.output) as unpacked:
            mapped = conversion if unpacked is archive else replace(conversion, source=open_source(unpacked))
            forget_tokens()
            records, read_sums = _write_tensors(mapped, arguments.output, journal, arguments.processes, not proof)
        records += _write_small_files(conversion, arguments.output, journal)
        check_unchanged(archive, made_from)
    finally:
        journal.close()
    # The digest is no part of what the journal compares: a killed run may not have come so far.
    made_from |= proof or {"checkpoint_digest": crc32_of(archive, workers_of(arguments.processes), read_sums)}
    manifest = Manifest("ft_checkpoint", tuple(sorted(records, key=lambda record: record.path)), made_from)
    finish(seal, manifest, archive, arguments)
    journal.remove()
    return manifest


def _names(conversion: Conversion) -> set[str]:
    """Name every file that a conversion writes."""
    shards = {name for each in conversion.assignments for name in conversion.settings.file_names(each)}
    tokenizer = conversion.source.tokenizer
    return {CONFIG_INI, *tokenizer.members, *tokenizer.made, *conversion.source.extra_files, *shards}


def _plan(arguments: ConvertArguments) -> Conversion:
    if arguments.random_weights:
        return plan_random(arguments.checkpoint, arguments.tensor_para_size, arguments.weight_data_type)
    archive = find_archive(arguments.checkpoint, given_files(arguments))
    return plan_conversion(archive, arguments.tensor_para_size, arguments.weight_data_type, arguments.allow_nonfinite)


def _check_space(conversion: Conversion, output: Path, journal: Journal) -> None:
    settings = conversion.settings
    needed_bytes = SPARE_BYTES + sum(
        settings.size_bytes(assignment.target)
        for assignment in conversion.assignments
        for name in settings.file_names(assignment)
        if name not in journal.finished
    )
    if conversion.archive.is_compressed:
        needed_bytes += sum(conversion.archive.sizes.values())
    check_space(output, needed_bytes)


def _write_tensors(
    conversion: Conversion, output: Path, journal: Journal, processes: int, sums_reads: bool
) -> tuple[list[FileRecord], Mapping[str, Sequence[SummedRange]]]:
    """Write all tensors, the largest first so that no process is left with one at the end.

    Returns:
        The files' records; and, if ``sums_reads``, what was read of the checkpoint with its checksums, by path.

    Raises:
        KeyboardInterrupt: with how far it came.
    """
    settings, verified = conversion.settings, set[RecordKey]()
    largest_first = sorted(conversion.assignments, key=lambda entry: -settings.size_bytes(entry.target))
    total_bytes = sum(settings.size_bytes(a.target) * len(settings.file_names(a)) for a in largest_first)
    workspaces: list[Workspace] = []  # one in each process, made where it is used

    def write(number: int, advance: Advance) -> tuple[list[FileRecord], list[FileRange]]:
        if not workspaces:
            workspaces.append(Workspace(verified, sums_reads))
        entry, workspace = largest_first[number], workspaces[0]
        written = write_tensor(entry, conversion.sources(entry), settings, output, journal, workspace, advance)
        return written, workspace.read_sums.taken()

    records: list[FileRecord] = []
    ranges: list[FileRange] = []
    count = 0
    with (
        interrupts_say(lambda: f"{count} of {len(largest_first)} tensors", records),
        Progress("convert", len(largest_first), "tensors", total_bytes) as progress,
    ):
        progress.skip(sum(record.size_bytes for record in journal.finished.values()))
        for written, read in run_all(
            workers_of(processes), len(largest_first), write, lambda size_bytes: progress.advance(0, size_bytes)
        ):
            records += written
            ranges += read
            count += 1
            progress.advance(1)
    return records, by_path(ranges)


def _write_small_files(conversion: Conversion, output: Path, journal: Journal) -> list[FileRecord]:
    source, settings = conversion.source, conversion.settings
    tokenizer = source.tokenizer
    contents = {**tokenizer.contents(source.archive), **tokenizer.text_ids.files(), **find_chat(source).files()}
    contents |= source.extra_files
    values = ConfigValues(
        dims=settings.dims,
        tensor_para_size=settings.tensor_para_size,
        data_type=settings.data_type,
        start_id=source.ids.start_id,
        end_id=source.ids.end_id,
        extra=with_exact_gelu(source),
    )
    contents[CONFIG_INI] = render_config(source.family, values).encode()
    return [write_bytes(output / name, content, journal) for name, content in contents.items()]


def with_exact_gelu(source: Source) -> Sections:
    """Add what FasterTransformer's name of the feed-forward's function does not say; see ``Source.activation``."""
    sections = {name: dict(keys) for name, keys in source.extra_config.items()}
    if source.activation:
        sections.setdefault(source.family.main, {})[EXACT_GELU] = 1
    return sections
