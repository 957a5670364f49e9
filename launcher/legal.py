"""What a configuration may say: keys and group options, for error messages."""

from __future__ import annotations

import dataclasses
import typing

from handover.errors import nearest
from launcher.config import PROJECT_DIR, Config


def legal_keys(parent: str) -> list[str]:
    """Keys below a dotted path of the schema; the top-level ones where the path is unknown."""
    node: type = Config
    for word in filter(None, parent.split(".")):
        hint = typing.get_type_hints(node).get(word) if dataclasses.is_dataclass(node) else None
        hint = next((arm for arm in typing.get_args(hint) if dataclasses.is_dataclass(arm)), hint)  # a section or None
        if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
            return []
        node = hint
    return [field.name for field in dataclasses.fields(node)]


def legal_options(group: str, option: str) -> str:
    """Say which option of a config group was probably meant, and list them all."""
    return nearest(option, options(group))


def options(group: str) -> list[str]:
    """What a config group has to choose from."""
    root = PROJECT_DIR / "conf" / group
    return [path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")]
