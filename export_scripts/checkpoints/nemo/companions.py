"""What training made for a model and saved apart: it lies in one directory with the model, and both are one checkpoint.

The files of each companion get a folder of their own in the checkpoint's archive, ``<kind>/<file name>/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from export_scripts.checkpoints.files.archive import Archive, Extent, open_archive
from handover.errors import CheckpointError


def with_companions(path: Path, model: Archive, companions: Mapping[str, Path]) -> Archive:
    """Put a model's files and those of its companions into one archive.

    Raises:
        CheckpointError: one of them is compressed and cannot be mapped.
    """
    extents = {name: model.extent(name) for name in _names(model)}
    for folder, companion in companions.items():
        archive = open_archive(companion)
        extents |= {f"{folder}/{name}": archive.extent(name) for name in _names(archive)}
    return Archive(path, extents, remark=model.remark)


def companions_of(archive: Archive, kind: str) -> dict[str, Archive]:
    """Return the companions of a kind as archives of their own, by the name of the file they were in, in order."""
    folders = sorted({name.split("/")[1] for name in archive.sizes if name.startswith(f"{kind}/")})
    result = {}
    for folder in folders:
        start = f"{kind}/{folder}/"
        extents = {name.removeprefix(start): archive.extent(name) for name in archive.sizes if name.startswith(start)}
        result[folder] = Archive(_place(extents), extents)
    return result


def _place(extents: Mapping[str, Extent]) -> Path:
    """Return where a companion lies, as errors name it: the directory of its files, or the archive that they are in."""
    name, first = min(extents.items())
    inner = Path(name).parts
    return first.path.parents[len(inner) - 1] if first.path.parts[-len(inner) :] == inner else first.path


def _names(archive: Archive) -> Iterator[str]:
    if archive.is_compressed:
        raise CheckpointError(
            f"{archive.path} is compressed", "unpack it: a model must be plain beside what belongs to it, and that too"
        )
    yield from archive.sizes
