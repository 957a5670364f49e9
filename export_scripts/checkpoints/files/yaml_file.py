"""A configuration in YAML inside a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from export_scripts.checkpoints.files.archive import Archive
from handover.errors import CheckpointError


def read_yaml(archive: Archive, name: str) -> Mapping[str, Any]:
    """Read a mapping; no tag of YAML makes an object.

    Raises:
        CheckpointError: it is missing, not YAML, or not a mapping.
    """
    if name not in archive:
        raise CheckpointError(f"{archive.path} has no {name}", "it is not a NeMo checkpoint")
    try:
        config = yaml.load(archive.read_bytes(name), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{archive.path}: {name} is not YAML: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{archive.path}: {name} is not a mapping")
    return config
