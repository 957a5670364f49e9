"""Convert a checkpoint into FasterTransformer's shards.

    python3 -m export_scripts.convert --checkpoint=gpt.nemo --output=1-gpu --tensor-para-size=1 --weight-data-type=fp16

Tensors are mapped out of the archive one at a time, rearranged, split, cast and written with their digests in one
pass. A killed conversion continues where it stopped.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.given import GivenFiles
from export_scripts.checkpoints.huggingface.hub import fetch
from export_scripts.checkpoints.proof import UNPROVED, check_pinned, check_published, crc32_of, unproved
from export_scripts.conversion.check import Conversion, plan_conversion
from export_scripts.conversion.journal import Journal
from export_scripts.conversion.mapped import RecordKey
from export_scripts.conversion.nemo_ids import with_nemos_ids
from export_scripts.conversion.random_weights import are_random, plan_random
from export_scripts.conversion.shard_file import full_disk_explained
from export_scripts.conversion.shards import Workspace, check_space, write_bytes, write_tensor
from export_scripts.conversion.special_ids import with_settled_ids
from export_scripts.conversion.workers import Advance, run_all
from ft_format.config_ini import FILE_NAME as CONFIG_INI
from ft_format.families.family import ConfigValues, render_config
from handover.durable import temporary_beside
from handover.errors import CheckpointError, exit_status
from handover.manifest import RANDOM_WEIGHTS, FileRecord, Manifest
from handover.progress import Progress

# Room for the files that are not shards, the manifest and the file system's own bookkeeping.
_SPARE_BYTES = 16 << 20
# Written into the journal: work of an older layout is not continued.
_LAYOUT_VERSION = 2


def convert(arguments: ConvertArguments) -> Manifest:
    """Convert a checkpoint and write the manifest last.

    Raises:
        CheckpointError: the checkpoint cannot be converted; see ``check.inspect_checkpoint``.
        ArtefactError: the disk is full or the output directory holds foreign files.
    """
    conversion = _plan(arguments)
    archive = conversion.archive
    if archive.path.resolve() == arguments.output.resolve():
        raise CheckpointError(f"{archive.path} is the checkpoint and the output", "give another directory to write to")
    made_from = {
        "checkpoint": str(archive.path),
        "checkpoint_identity": archive.identity(),
        "source_format": conversion.source.source_map.name,
        "tensor_para_size": arguments.tensor_para_size,
        "weight_data_type": arguments.weight_data_type,
    }
    made_from |= _given(arguments).made_from()
    if arguments.allow_nonfinite:
        made_from["allow_nonfinite"] = True
    made_from |= {key: given for key in ("start_id", "end_id") if (given := getattr(arguments, key)) is not None}
    if arguments.random_weights or are_random(archive):
        made_from[RANDOM_WEIGHTS] = True
    journal = Journal(arguments.output, {**made_from, "layout_version": _LAYOUT_VERSION}, _names(conversion))
    try:
        _check_space(conversion, arguments.output, journal)
        named, nemos_remark = with_nemos_ids(conversion.source)
        source = with_settled_ids(named, arguments.start_id, arguments.end_id)
        conversion = replace(conversion, source=source)
        print(f"convert: {source.source_map.name}, for FasterTransformer's {source.family.name}", file=sys.stderr)
        for remark in (*source.remarks, *filter(None, (nemos_remark,))):
            print(f"convert: note: {remark}", file=sys.stderr)
        proof = {RANDOM_WEIGHTS: True} if arguments.random_weights else _proof(conversion, arguments)
        with _mappable(conversion, arguments.output) as mapped:
            records = _write_tensors(mapped, arguments.output, journal, arguments.processes)
        records += _write_small_files(conversion, arguments.output, journal)
        if archive.identity() != made_from["checkpoint_identity"]:
            raise CheckpointError(f"{archive.path} was changed while it was converted", "convert again, from the start")
    finally:
        journal.close()
    # Its pages have just been read. It is no part of what the journal compares: a killed run may not have come so far.
    made_from |= proof or {"checkpoint_digest": crc32_of(archive, workers_of(arguments.processes))}
    manifest = Manifest("ft_checkpoint", tuple(sorted(records, key=lambda record: record.path)), made_from)
    manifest.write(arguments.output)
    journal.remove()
    return manifest


def _names(conversion: Conversion) -> set[str]:
    """Name every file that a conversion writes."""
    shards = {name for each in conversion.assignments for name in conversion.settings.file_names(each)}
    return {CONFIG_INI, *conversion.source.tokenizer.members, *conversion.source.extra_files, *shards}


def _plan(arguments: ConvertArguments) -> Conversion:
    if arguments.random_weights:
        return plan_random(arguments.checkpoint, arguments.tensor_para_size, arguments.weight_data_type)
    archive = find_archive(arguments.checkpoint, _given(arguments))
    return plan_conversion(archive, arguments.tensor_para_size, arguments.weight_data_type, arguments.allow_nonfinite)


def _given(arguments: ConvertArguments) -> GivenFiles:
    return GivenFiles(arguments.adapter, arguments.tokenizer)


def _proof(conversion: Conversion, arguments: ConvertArguments) -> dict[str, object]:
    """Compare the checkpoint's bytes with the digests that there are, and say so where nothing proves them.

    Returns:
        What the manifest says of it; nothing where nothing proves them.

    Raises:
        CheckpointError: the bytes are not those of a digest.
    """
    archive, processes = conversion.archive, workers_of(arguments.processes)
    if arguments.checkpoint_sha256:
        check_pinned(archive, arguments.checkpoint_sha256, processes)
        return {"checkpoint_sha256": arguments.checkpoint_sha256.lower()}
    published = check_published(archive, processes)
    sources = [source for assignment in conversion.assignments for source in conversion.sources(assignment)]
    if unproved(archive, sources, published):
        print(f"convert: note: {UNPROVED}", file=sys.stderr)
        return {}
    return {"checkpoint_published": published} if published else {"checkpoint_checksums": "compared"}


@contextmanager
def _mappable(conversion: Conversion, output: Path) -> Iterator[Conversion]:
    """Unpack a gzipped archive beside the shards; the journal's next reader removes what a killed run leaves of it."""
    if not conversion.archive.is_compressed:
        yield conversion
        return
    directory = temporary_beside(output / "unpacked")
    with full_disk_explained(directory):
        unpacked = conversion.archive.unpack(directory)
    yield replace(conversion, source=open_source(unpacked))
    shutil.rmtree(directory)


def _check_space(conversion: Conversion, output: Path, journal: Journal) -> None:
    settings = conversion.settings
    needed_bytes = _SPARE_BYTES + sum(
        settings.size_bytes(assignment.target)
        for assignment in conversion.assignments
        for name in settings.file_names(assignment)
        if name not in journal.finished
    )
    if conversion.archive.is_compressed:
        needed_bytes += sum(conversion.archive.sizes.values())
    check_space(output, needed_bytes)


def _write_tensors(conversion: Conversion, output: Path, journal: Journal, processes: int) -> list[FileRecord]:
    """Write all tensors, the largest first so that no process is left with one at the end.

    Raises:
        KeyboardInterrupt: with how far it came.
    """
    settings, verified = conversion.settings, set[RecordKey]()
    largest_first = sorted(conversion.assignments, key=lambda entry: -settings.size_bytes(entry.target))
    total_bytes = sum(settings.size_bytes(a.target) * len(settings.file_names(a)) for a in largest_first)
    workspaces: list[Workspace] = []  # one in each process, made where it is used

    def write(number: int, advance: Advance) -> list[FileRecord]:
        if not workspaces:
            workspaces.append(Workspace(verified))
        entry = largest_first[number]
        return write_tensor(entry, conversion.sources(entry), settings, output, journal, workspaces[0], advance)

    records: list[FileRecord] = []
    count = 0
    with (
        _interrupts_say(lambda: f"{count} of {len(largest_first)} tensors", records),
        Progress("convert", len(largest_first), "tensors", total_bytes) as progress,
    ):
        progress.skip(sum(record.size_bytes for record in journal.finished.values()))
        for written in run_all(
            workers_of(processes), len(largest_first), write, lambda size_bytes: progress.advance(0, size_bytes)
        ):
            records += written
            count += 1
            progress.advance(1)
    return records


@contextmanager
def _interrupts_say(done: Callable[[], str], records: Sequence[FileRecord]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        last = f", the last one {records[-1].path}" if records else ""
        raise KeyboardInterrupt(f"after {done()}{last}; the next run continues") from None


def workers_of(processes: int) -> int:
    """Tensors converted at a time: as many as are allowed and there are processors for."""
    return max(1, min(processes, len(os.sched_getaffinity(0))))


def _write_small_files(conversion: Conversion, output: Path, journal: Journal) -> list[FileRecord]:
    source, settings = conversion.source, conversion.settings
    contents = {**source.tokenizer.contents(source.archive), **source.tokenizer.text_ids.files(), **source.extra_files}
    values = ConfigValues(
        dims=source.dims,
        tensor_para_size=settings.tensor_para_size,
        data_type=settings.data_type,
        start_id=source.ids.start_id,
        end_id=source.ids.end_id,
        extra=source.extra_config,
    )
    contents[CONFIG_INI] = render_config(source.family, values).encode()
    return [write_bytes(output / name, content, journal) for name, content in contents.items()]


def main(argv: Sequence[str]) -> None:
    """Run the conversion that the arguments name."""
    arguments = ConvertArguments.from_argv(argv, description=__doc__)
    if arguments.hub_name:
        fetch(arguments.hub_name, arguments.checkpoint, say=lambda line: print(f"convert: {line}", file=sys.stderr))
    convert(arguments)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "convert"))
