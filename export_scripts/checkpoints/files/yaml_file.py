"""A configuration in YAML inside a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from export_scripts.checkpoints.files.archive import Archive
from handover.errors import CheckpointError

# NeMo's configurations have some 20 KB; a node takes a few hundred times its two bytes while it is parsed.
_LARGEST_BYTES = 1 << 20
_MOST_VALUES = 100_000
_DEEPEST = 100
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(archive: Archive, name: str) -> Mapping[str, Any]:
    """Read a mapping; no tag of YAML makes an object.

    Raises:
        CheckpointError: it is missing, not YAML, or not a mapping.
    """
    if name not in archive:
        raise CheckpointError(f"{archive.path} has no {name}", "it is not a NeMo checkpoint")
    return parse_yaml(archive.read_bytes(name), f"{archive.path}: {name}")


def parse_yaml(content: bytes, where: str) -> dict[str, Any]:
    """Parse a mapping; no tag of YAML makes an object.

    Raises:
        CheckpointError: it is too large for a configuration, not YAML, or not a mapping.
    """
    try:
        _check_events(content)
        config = yaml.load(content, _LOADER)
        if _count(config, {}) > _MOST_VALUES:
            raise ValueError("its aliases stand for values without end")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not YAML of a configuration: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{where} is not a mapping")
    return config


def _check_events(content: bytes) -> None:
    """Refuse what is dangerous to put together; its parts come one by one."""
    if len(content) > _LARGEST_BYTES:
        raise ValueError(f"it has {len(content)} bytes")
    depth = 0
    for event in yaml.parse(content, _LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError(f"it is nested more than {_DEEPEST} deep")
        if isinstance(event, yaml.ScalarEvent) and event.value == "<<":
            raise ValueError("it has a merge key (<<), which multiplies what aliases stand for")


def _count(value: Any, known: dict[int, int]) -> int:
    """Count the values that one stands for; what is within itself counts without end."""
    if not isinstance(value, (dict, list, tuple, set)):
        return 1
    if id(value) not in known:
        known[id(value)] = _MOST_VALUES + 1
        within = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(each, known) for each in within)
    return known[id(value)]
