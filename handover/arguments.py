"""One dataclass per script: it renders the argv on the login node and parses it where the script runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from handover.ranges import RANGE, check_ranges

Arguments = TypeVar("Arguments", bound="ScriptArguments")


@dataclasses.dataclass(frozen=True)
class ScriptArguments:
    """Base of the argument dataclasses.

    Field types may be str, int, float, bool, Path, ``X | None`` of those, and ``tuple[...]`` (any
    nesting of JSON values). ``field(metadata={"help": ...})`` documents a flag with its unit;
    ``metadata={"positional": True}`` makes it an argument without a flag.
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
            ConfigError: a number is out of the range that its field declares.
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
        given = cls(**vars(parser.parse_args(list(argv))))
        check_ranges(given)
        return given


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
    return _boolean if hint is bool else (Path if hint is Path else hint)


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"'{text}' is not true or false")


def _tuple(text: str) -> tuple[Any, ...]:
    def freeze(value: Any) -> Any:
        return tuple(freeze(item) for item in value) if isinstance(value, list) else value

    try:
        return tuple(freeze(json.loads(text)))
    except (json.JSONDecodeError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not a JSON list") from error
