"""The formats that are read, and which of them a path holds.

A format is a module with ``NAME``, ``is_candidate(path)``, ``recognises(archive)`` and ``open_source(archive)``; adding
one is a line here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from export_scripts.checkpoints import (
    fastertransformer,
    gptj_slim,
    huggingface,
    huggingface_t5,
    megatron,
    nemo,
    nemo2,
    nemo_t5,
)
from export_scripts.checkpoints.archive import Archive, open_archive
from export_scripts.checkpoints.source import Source
from handover.errors import CheckpointError


class Format(Protocol):
    """One format of checkpoints."""

    NAME: str

    def is_candidate(self, path: Path) -> bool:
        """Whether a file or directory looks like one checkpoint of this format, by names alone."""

    def recognises(self, archive: Archive) -> bool:
        """Whether the files are a checkpoint of this format; cheap."""

    def open_source(self, archive: Archive) -> Source:
        """Read configuration and keys; CheckpointError where FasterTransformer cannot express the model."""


FORMATS: tuple[Format, ...] = (
    huggingface_t5,
    nemo2,
    nemo_t5,
    nemo,
    megatron,
    gptj_slim,
    huggingface,
    fastertransformer,
)


def find_checkpoint(path: Path) -> Path:
    """Find the one checkpoint that a path means.

    Args:
        path: a checkpoint, or a directory that holds exactly one of them.

    Raises:
        CheckpointError: there is none, or there are several, which are listed.
    """
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist", "checkpoint_path names a .nemo archive or an unpacked directory"
        )
    if not path.is_dir() or _is_candidate(path):
        return path
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    found = [entry for entry in entries if _is_candidate(entry)]
    if len(found) > 1:
        names = "\n  ".join(entry.name for entry in found)
        raise CheckpointError(f"{path} holds {len(found)} checkpoints\n  {names}", "give the path of one of them")
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint", f"these are read: {_names()}")
    return found[0]


def open_source(archive: Archive) -> Source:
    """Open a checkpoint by the first format that recognises it.

    Raises:
        CheckpointError: no format does, or the model cannot be expressed.
    """
    for each in FORMATS:
        if each.recognises(archive):
            return each.open_source(archive)
    raise CheckpointError(f"{archive.path} is no checkpoint of a known format", f"these are read: {_names()}")


def find_archive(path: Path) -> Archive:
    """Find the checkpoint that a path means and list its files; see ``find_checkpoint`` and ``open_archive``."""
    return open_archive(find_checkpoint(path))


def _is_candidate(path: Path) -> bool:
    return any(each.is_candidate(path) for each in FORMATS)


def _names() -> str:
    return ", ".join(each.NAME for each in FORMATS)
