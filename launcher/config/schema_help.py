"""What a configuration may say: keys and group options, for error messages."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from evaluation.task_table import TASKS
from handover.errors import nearest
from launcher.config.schema import PROJECT_DIR, Config


def legal_keys(parent: str) -> list[str]:
    """Keys below a dotted path of the schema; the top-level ones where the path is unknown."""
    node: type = Config
    for word in filter(None, parent.split(".")):
        section = _section(node, word)
        if section is None:
            return []
        node = section
    return [field.name for field in dataclasses.fields(node)]


def leaf_above(key: str) -> str:
    """The part of a dotted key that is a value already, so that nothing is below it; empty where there is none."""
    node: type = Config
    words = key.split(".")
    for count, word in enumerate(words[:-1], 1):
        section = _section(node, word)
        if section is None:
            return ".".join(words[:count]) if word in typing.get_type_hints(node) else ""
        node = section
    return ""


def type_of(key: str) -> Any:
    """The declared type of a dotted key, ``Any`` of a key in a free mapping; None where there is no such key."""
    node: type = Config
    words = key.split(".")
    for count, word in enumerate(words, 1):
        section = _section(node, word)
        if section is None:
            hint = typing.get_type_hints(node).get(word)
            is_free = typing.get_origin(hint) is dict and typing.get_args(hint)[-1] is Any
            return hint if count == len(words) else Any if is_free else None
        node = section
    return None


def _section(node: type, word: str) -> type | None:
    """The dataclass that a key of another holds; None where it holds a value or there is no such key."""
    hint = typing.get_type_hints(node).get(word)
    hint = next((arm for arm in typing.get_args(hint) if dataclasses.is_dataclass(arm)), hint)  # a section or None
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def legal_options(group: str, option: str) -> str:
    """Return which option of a config group was probably meant, and list them all."""
    return nearest(option, options(group))


def options(group: str) -> list[str]:
    """What a config group has to choose from; nothing if it is none of ours."""
    if group.split("/")[0] not in legal_keys(""):
        return []
    root = PROJECT_DIR / "conf" / group
    files = [path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")]
    return files + [task for task in TASKS if group == "evaluation" and task not in files]
