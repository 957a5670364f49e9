"""Options that a script and the configuration share: declared as the script's arguments, keys of a section here.

A section has what OmegaConf can hold, texts for paths and lists for tuples; ``filled`` is the way back.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from handover.arguments import PATHS, SECTION, ScriptArguments, same

Arguments = TypeVar("Arguments", bound=ScriptArguments)
Section = TypeVar("Section")


def options_of(
    arguments: type[ScriptArguments], leave_out: Collection[str] = (), parts: Collection[str] = (), prefix: str = ""
) -> Callable[[type[Section]], type[Section]]:
    """Make a class a section with a key for each argument of a script.

    An argument that the script cannot do without is null here until it is given.

    Args:
        arguments: the script's.
        leave_out: those that are no keys.
        parts: sections in it, of the arguments whose names begin with theirs: ``search.low`` is ``search_low``.
        prefix: that names have as arguments only.
    """
    hints = typing.get_type_hints(arguments)
    names = [entry.name for entry in dataclasses.fields(arguments)]
    own = [name for name in names if name not in leave_out and name.startswith(prefix)]

    def decorate(section: type[Section]) -> type[Section]:
        for argument in own:
            if not argument.startswith(tuple(f"{part}_" for part in parts)):
                name, option = argument.removeprefix(prefix), same(arguments, argument)
                is_needed = option.default is option.default_factory is dataclasses.MISSING
                hint = option.metadata.get(SECTION) or key_type(hints[argument])
                section.__annotations__[name] = hint | None if is_needed else hint
                setattr(section, name, None if is_needed else option)
        for name in parts:
            part: type[Any] = options_of(arguments, prefix=f"{name}_")(type(name, (), {}))
            section.__annotations__[name] = part
            setattr(section, name, dataclasses.field(default_factory=part))
        return dataclasses.dataclass(section)

    return decorate


def filled(arguments: type[Arguments], *sections: Any, **own: Any) -> Arguments:
    """Fill a script's arguments in from sections of the configuration, as far as the names agree.

    Args:
        arguments: the script's.
        sections: the last that has a name counts.
        own: arguments that are no keys, or other than their keys.
    """
    hints = typing.get_type_hints(arguments)
    given: dict[str, Any] = {}
    for section in sections:
        for entry in dataclasses.fields(section):
            value = getattr(section, entry.name)
            if entry.name in hints:
                given[entry.name] = value
            elif dataclasses.is_dataclass(value):
                given |= {f"{entry.name}_{name}": inner for name, inner in vars(value).items()}
    known = {name: _argument(value, hints[name]) for name, value in given.items() if name in hints and name not in own}
    return arguments(**known, **own)


def key_type(hint: Any) -> Any:
    """Return the type of a key for that of an argument."""
    if hint in PATHS:
        return str if hint is Path else str | None
    return list[key_type(typing.get_args(hint)[0])] if typing.get_origin(hint) is tuple else hint  # type: ignore[misc]


def _argument(value: Any, hint: Any) -> Any:
    """Return a key's value as its argument is; a file by its absolute path, since stages run elsewhere."""
    if isinstance(value, str) and hint in PATHS:
        # os.path leaves the "~" of a user who does not exist, so that a check names the file; Path would fail.
        return Path(os.path.expanduser(value)).absolute() if value else None
    if dataclasses.is_dataclass(value):
        return tuple(vars(value).items())
    if isinstance(value, Mapping):
        return tuple((name, _argument(one, Any)) for name, one in value.items())
    if isinstance(value, list):
        return tuple(_argument(one, Any) for one in value)
    if isinstance(value, bool) and hint is int:
        return int(value)
    return str(value) if isinstance(value, Enum) else value
