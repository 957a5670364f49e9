"""One dataclass per script: it renders the argv on the login node and parses it where the script runs."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from handover.errors import ConfigError, shortened
from handover.ranges import RANGE, check_ranges, fits
from handover.regular_file import is_special
from models.checks import Range

SECTION, IS_TEXT, IS_PATH = "section", "is_text", "is_path"
"""Keys of a field's metadata, about the key of the configuration that it is too: the type that it has there, where that
is another; that its strings are texts, which may hold several lines; that its text is a path, and so not empty, as the
value of a shell's unset variable is."""
PATHS = (Path, Path | None)
Arguments = TypeVar("Arguments", bound="ScriptArguments")


@dataclasses.dataclass(frozen=True)
class ScriptArguments:
    """Base of the argument dataclasses.

    Field types may be str, int, float, bool, Path, ``X | None`` of those, and ``tuple[...]`` (any nesting of JSON
    values). ``option(...)``, or ``field(metadata={"help": ...})`` of one that must be given, documents a flag with its
    unit; ``metadata={"positional": True}`` makes it an argument without a flag.
    """

    def to_argv(self) -> tuple[str, ...]:
        """Render as ``--name=value``; a None is left out, a tuple becomes JSON."""
        return tuple(
            _render(value) if field.metadata.get("positional") else f"{_flag(field)}={_render(value)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None
        )

    @classmethod
    def from_argv(cls: type[Arguments], argv: Sequence[str], description: str | None = None) -> Arguments:
        """Parse what ``to_argv`` rendered (or a person typed).

        Raises:
            ConfigError: a number is out of the range that its field declares, or a word is not UTF-8.
        """
        hints = typing.get_type_hints(cls)
        parser = argparse.ArgumentParser(
            description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        for field in dataclasses.fields(cls):
            if field.metadata.get("positional"):
                parser.add_argument(field.name, type=_parser_of(hints[field.name]), help=_help(field))
                continue
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            parser.add_argument(
                _flag(field),
                type=_parser_of(hints[field.name]),
                required=required,
                default=argparse.SUPPRESS,
                help=_help(field),
            )
        given = cls(**vars(parser.parse_args(list(map(_check_text, argv)))))
        for field in dataclasses.fields(cls):
            if not fits(getattr(given, field.name), hints[field.name]):
                parser.error(f"argument {_flag(field)}: {shortened(str(getattr(given, field.name)))} has another form")
        check_ranges(given)
        return given


def option(default: Any, help: str, allowed: Range | None = None, **metadata: Any) -> Any:
    """Declare a dataclass field that is an argument with a default.

    Args:
        default: of the argument.
        help: what it means, with its unit.
        allowed: numbers that are legal, of an argument that is one or holds some.
        metadata: more of it.
    """
    metadata |= {"help": help} | ({} if allowed is None else {RANGE: allowed})
    return dataclasses.field(default=default, metadata=metadata)


def same(arguments: type[ScriptArguments], name: str, **changed: Any) -> Any:
    """Declare a dataclass field as a script's argument of that name is: default, range and sentence.

    Args:
        arguments: the script's.
        name: of the argument.
        changed: what is different here, such as ``default``.
    """
    (field,) = (field for field in dataclasses.fields(arguments) if field.name == name)
    default = changed.pop("default", field.default)
    is_path = _hints_of(arguments)[name] in PATHS  # type: ignore[arg-type]  # a class can be hashed
    metadata = {**field.metadata, IS_PATH: is_path, **changed}
    if isinstance(default, tuple):  # OmegaConf has lists and mappings, which a dataclass makes for each instance
        made = typing.get_origin(metadata.get(SECTION)) or list
        return dataclasses.field(default_factory=lambda: made(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def _hints_of(arguments: type[ScriptArguments]) -> dict[str, Any]:
    """Evaluate the types of a script's arguments once: the configuration asks for 220 of them, one by one."""
    return typing.get_type_hints(arguments)


def _flag(field: dataclasses.Field[Any]) -> str:
    return f"--{field.name.replace('_', '-')}"


def _help(field: dataclasses.Field[Any]) -> str:
    """What the flag means, and its range; argparse takes a percent sign for a format."""
    text, allowed = str(field.metadata.get("help", "")), field.metadata.get(RANGE)
    return (text if allowed is None else f"{text} ({allowed})").replace("%", "%%")


def _render(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return json.dumps(value)
    return str(value)


def _parser_of(hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
        origin = typing.get_origin(hint)
    if origin is tuple:
        return _tuple
    return _boolean if hint is bool else (_path if hint is Path else hint)


def _check_text(word: str) -> str:
    """Refuse bytes that are no text: they could not be printed or written into any file of ours."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the argument {shortened(repr(word))} is not UTF-8") from None
    return word


def _path(text: str) -> Path:
    """Take a path, unless no program of ours has any business with it."""
    path = Path(text)
    if not text or str(path) == path.anchor:
        raise argparse.ArgumentTypeError(f"'{text}' is no file or directory of ours")
    if is_special(path):  # neither read, which may never end, nor replaced or removed, which would be for good
        raise argparse.ArgumentTypeError(f"{text} is a device, pipe or socket, not a file or directory")
    return path if path.name else path.absolute()  # "." has no name, which a temporary file beside it would need


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"'{shortened(text)}' is not true or false")


def _tuple(text: str) -> tuple[Any, ...]:
    def freeze(value: Any) -> Any:
        return tuple(freeze(item) for item in value) if isinstance(value, list) else value

    try:
        return tuple(freeze(json.loads(text)))
    except (ValueError, TypeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"'{shortened(text)}' is not a JSON list") from error
