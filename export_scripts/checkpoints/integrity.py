"""``integrity.json`` of Megatron-LM (``--verify-integrity``): the SHA-256 of every file of a distributed checkpoint.

Format: megatron-core, ``dist_checkpointing/validation.py`` (``save_integrity_manifest``): ``{"algorithm": "sha256",
"files": {name: 64 digits}}`` for what lies beside it, itself left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from export_scripts.checkpoints.files.bounded import DESCRIPTION_BYTES, BoundedReader, parse_json
from export_scripts.checkpoints.files.distributed_metadata import METADATA_FILE
from handover.digests import SHA256
from handover.errors import CheckpointError
from models.checks import shown

NAME = "integrity.json"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_SHOWN = 10


def listed_digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Read every ``integrity.json`` of a checkpoint.

    Args:
        files: of the checkpoint, by name; one of that name elsewhere is of something else.

    Returns:
        64 hexadecimal digits of each file that one of them names.

    Raises:
        CheckpointError: one is damaged, of another algorithm, or names a file that is not there.
    """
    found: dict[str, str] = {}
    for name, path in files.items():
        prefix = name.removesuffix(NAME)
        if name == f"{prefix}{NAME}" and f"{prefix}{METADATA_FILE}" in files:
            digests = _read(path)
            if missing := [each for each in digests if f"{prefix}{each}" not in files]:
                raise CheckpointError(
                    f"{path} lists {len(missing)} files that are not there: {', '.join(map(shown, missing[:_SHOWN]))}",
                    "copy the checkpoint again",
                )
            found |= {f"{prefix}{each}": digest for each, digest in digests.items()}
    return found


def _read(path: Path) -> dict[str, str]:
    with path.open("rb", buffering=0) as raw, BoundedReader(raw, str(path), DESCRIPTION_BYTES) as stream:
        content = parse_json(stream.read(), str(path))
    listed = content.get("files") if isinstance(content, dict) else None
    algorithm = content.get("algorithm", SHA256) if isinstance(content, dict) else None
    if algorithm != SHA256:
        raise CheckpointError(f"{path} has digests of {shown(algorithm)}", f"{SHA256} is compared")
    if not isinstance(listed, dict) or not all(isinstance(d, str) and _DIGEST.fullmatch(d) for d in listed.values()):
        raise CheckpointError(f"{path} is no list of SHA-256 digests by file", "copy the checkpoint again")
    return {name: digest.lower() for name, digest in listed.items()}
