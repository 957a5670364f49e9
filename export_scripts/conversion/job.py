"""What every conversion does, whatever it writes: prove the source, unpack it, and say how far it came."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.digests import UNPROVED, check_pinned, check_published, files_of, unproved
from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.user_files import GivenFiles
from export_scripts.conversion.plan.random_weights import are_random
from export_scripts.conversion.write.shard_file import full_disk_explained
from export_scripts.weights.schema import LazyTensor
from handover.digests import SHA256
from handover.durable import temporary_beside
from handover.errors import CheckpointError
from handover.identity import files_of as files_below
from handover.manifest import RANDOM_WEIGHTS, FileRecord, Manifest
from handover.signatures.sealing import Seal
from handover.signatures.trust import signature_of, verify

# Room for the files that are not weights, the manifest and the file system's own bookkeeping.
SPARE_BYTES = 16 << 20


def given_files(arguments: ConvertArguments) -> GivenFiles:
    """Name what is given beside the checkpoint."""
    return GivenFiles(arguments.adapter, arguments.tokenizer)


def check_apart(archive: Archive, output: Path) -> None:
    """Refuse to write a conversion over its source."""
    if archive.path.resolve() == output.resolve():
        raise CheckpointError(f"{archive.path} is the checkpoint and the output", "give another directory to write to")


def origin(archive: Archive, source_format: str, arguments: ConvertArguments) -> dict[str, object]:
    """Return for the manifest and the journal what a conversion is made from."""
    made_from: dict[str, object] = {
        "checkpoint": str(archive.path),
        "checkpoint_identity": archive.identity(),
        "source_format": source_format,
        "tensor_para_size": arguments.tensor_para_size,
        "weight_data_type": arguments.weight_data_type,
    }
    made_from |= given_files(arguments).made_from()
    if arguments.allow_nonfinite:
        made_from["allow_nonfinite"] = True
    made_from |= {key: given for key in ("start_id", "end_id") if (given := getattr(arguments, key)) is not None}
    if arguments.random_weights or are_random(archive):
        made_from[RANDOM_WEIGHTS] = True
    return made_from


def check_unchanged(archive: Archive, made_from: Mapping[str, object]) -> None:
    """Refuse a source that was written to meanwhile."""
    if archive.identity() != made_from["checkpoint_identity"]:
        raise CheckpointError(f"{archive.path} was changed while it was converted", "convert again, from the start")


def prove(archive: Archive, sources: Sequence[LazyTensor], arguments: ConvertArguments) -> dict[str, object]:
    """Compare the checkpoint's bytes with the digests that there are, and say so where nothing proves them.

    Returns:
        What the manifest says of it; nothing where nothing proves them.

    Raises:
        CheckpointError: the bytes are not those of a digest.
    """
    processes = workers_of(arguments.processes)
    if arguments.checkpoint_sha256:
        check_pinned(archive, arguments.checkpoint_sha256, processes)
        return {"checkpoint_sha256": arguments.checkpoint_sha256.lower()}
    published = check_published(archive, processes)
    if unproved(archive, sources, published):
        sys.stderr.write(f"convert: note: {UNPROVED}\n")
        return {}
    return {"checkpoint_published": published} if published else {"checkpoint_checksums": "compared"}


def check_signed(seal: Seal, archive: Archive, arguments: ConvertArguments) -> None:
    """Verify the signatures of the checkpoint, and of what is given beside it, before anything is written.

    Raises:
        ArtefactError: a signature is required and missing, of none who is trusted, or something was changed since.
    """
    places = archive.path, arguments.checkpoint  # a training's directory may be signed as a whole
    signed = next((place for place in places if signature_of(place).is_file()), archive.path)
    for path in filter(None, (signed, arguments.adapter, arguments.tokenizer)):
        if remark := verify(path, arguments, seal.digests):
            sys.stderr.write(f"convert: note: {remark}\n")


def finish(seal: Seal, manifest: Manifest, archive: Archive, arguments: ConvertArguments) -> None:
    """Sign what a conversion has written, where a key is given, and write its manifest."""
    materials = files_of(archive)
    for name, digest in dict(manifest.made_from.get("checkpoint_published", {})).items():
        seal.digests.know(materials[name], digest.removeprefix(f"{SHA256}:"))
    for kind, path in (("adapter", arguments.adapter), ("tokenizer", arguments.tokenizer)):
        if path is not None and path != archive.path:
            materials |= {f"{kind}/{name or path.name}": file for name, file in files_below(path).items()}
    if seal.key is not None:
        seal.digests.of(materials)
        check_unchanged(archive, manifest.made_from)
    seal.finish("convert", arguments.output, manifest, materials)


@contextmanager
def mappable(archive: Archive, output: Path) -> Iterator[Archive]:
    """Unpack a gzipped archive beside what is written; the journal's next reader removes what a killed run leaves."""
    if not archive.is_compressed:
        yield archive
        return
    directory = temporary_beside(output / "unpacked")
    with full_disk_explained(directory):
        unpacked = archive.unpack(directory)
    yield unpacked
    shutil.rmtree(directory)


@contextmanager
def interrupts_say(done: Callable[[], str], records: Sequence[FileRecord]) -> Iterator[None]:
    """Add to an interrupt how far a conversion came."""
    try:
        yield
    except KeyboardInterrupt:
        last = f", the last one {records[-1].path}" if records else ""
        raise KeyboardInterrupt(f"after {done()}{last}; the next run continues") from None


def workers_of(processes: int) -> int:
    """Tensors converted at a time: as many as are allowed and there are processors for."""
    return max(1, min(processes, len(os.sched_getaffinity(0))))
