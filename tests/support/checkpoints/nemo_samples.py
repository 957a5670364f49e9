"""Checkpoints that NeMo and megatron-core wrote, kept as differences from ``gpt122_tp1_pp1.nemo``.

All of them hold the same weights, so that a file is mostly pieces of that one. A delta is LZMA over one line of JSON
(``sha256``, ``size`` and ``copies``: offset here, offset there, length) and the bytes between the pieces.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import tarfile
from pathlib import Path

from support.checkpoints.nemo_archive import NEMO

BASE = NEMO / "gpt122_tp1_pp1.nemo"


def restore(name: str, directory: Path) -> Path:
    """Write a file as NeMo wrote it, to the last byte."""
    head, _, literals = lzma.decompress((NEMO / f"deltas/{name}.delta").read_bytes()).partition(b"\n")
    recipe, base = json.loads(head), BASE.read_bytes()
    content, position, taken = bytearray(), 0, 0
    for offset, source, length in [*recipe["copies"], [recipe["size"], 0, 0]]:
        content += literals[taken : taken + offset - position]
        taken += offset - position
        content += base[source : source + length]
        position = offset + length
    assert hashlib.sha256(content).hexdigest() == recipe["sha256"]
    (directory / name).write_bytes(content)
    return directory / name


def unpacked(archive: Path, directory: Path) -> Path:
    """Unpack an archive with tarfile."""
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    return directory
