"""Whether every value of the configuration is of its type, in its range and fit for the files that it is written into.

OmegaConf converts what is written; what an interpolation brings, and what stands in lists, it takes as it is.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from handover.arguments import IS_PATH, IS_TEXT
from handover.errors import ConfigError, shortened
from handover.ranges import check_ranges, fits, is_scalar
from launcher.config.export import TAKES_NAMES
from launcher.config.schema import Config

_WORDS: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
    Any: "a name, a number, or a list of them",
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SBATCH_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_ONE_VALUE = "it is one value: text, a number, true, false or null"


def check_values(config: Config) -> None:
    """Check all values of a run; the first that is wrong is raised.

    Raises:
        ConfigError: a value has another type than its key, a number is out of range, or a text holds what would break
            the lines of the files that it is written into.
    """
    _check_section(config, "")
    check_ranges(config)
    _check_names(config.env_vars, "env_vars", "a variable of the environment", _VARIABLE)
    options = config.cluster.additional_parameters
    _check_names(options, "cluster.additional_parameters", "an option of sbatch", _SBATCH_OPTION)
    for name, value in options.items():
        _check_line(f"cluster.additional_parameters.{name}", value)


def _check_section(section: Any, place: str) -> None:
    hints = typing.get_type_hints(type(section))
    for entry in dataclasses.fields(section):
        key, value = f"{place}{entry.name}", getattr(section, entry.name)
        _check_type(entry, hints[entry.name], key, value)
        if entry.metadata.get(IS_PATH) and value == "":
            raise ConfigError(f"{key} is empty", "name a file, or leave it out")
        if not entry.metadata.get(IS_TEXT):
            _check_line(key, value)
        if dataclasses.is_dataclass(value):
            _check_section(value, f"{key}.")
        elif isinstance(value, dict):
            for name, one in value.items():
                if dataclasses.is_dataclass(one):
                    _check_section(one, f"{key}.{name}.")


def _check_type(entry: dataclasses.Field[Any], hint: Any, key: str, value: Any) -> None:
    if entry.metadata.get(TAKES_NAMES) and isinstance(value, dict):
        for name, one in value.items():
            _check_line(f"{key}.{name}", one)
    elif not fits(value, hint):
        raise ConfigError(f"{key} is {shortened(repr(value))}", f"it is {_words(hint)}")


def _words(hint: Any) -> str:
    """Return a type in a user's words."""
    arms = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_words, arms))
    if origin is list:
        return f"a list, each {_words(arms[0])}"
    if origin is dict:
        return "a mapping: {name: value}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(choice.name for choice in hint)}"
    return _WORDS.get(hint, "a section with keys of its own")


def _check_names(given: Mapping[Any, Any], key: str, meaning: str, legal: re.Pattern[str]) -> None:
    for name, value in given.items():
        if not isinstance(name, str) or not legal.fullmatch(name):
            raise ConfigError(f"{key} names {shortened(repr(name))}, which cannot be {meaning}")
        if not is_scalar(value):
            raise ConfigError(f"{key}.{name} is a list or mapping", _ONE_VALUE)
        if isinstance(value, str) and any(map(_is_no_text, value)):
            raise ConfigError(f"{key}.{name} holds a NUL or bytes that are not UTF-8")


def _check_line(key: str, value: Any) -> None:
    """Refuse what would end a line of a job's file, or cannot be written at all."""
    for text in _texts(value):
        if any(ord(character) < 32 or ord(character) == 127 or _is_no_text(character) for character in text):
            raise ConfigError(
                f"{key} holds a line feed or another control character: {shortened(repr(text))}",
                "write one line; of several, such as cluster.setup has, each is an element of the list",
            )


def _is_no_text(character: str) -> bool:
    return character == "\0" or 0xD800 <= ord(character) < 0xE000


def _texts(value: Any) -> list[str]:
    """Texts that a value is or that stand in its lists; mappings have checks of their own."""
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return [value] if isinstance(value, str) else []
