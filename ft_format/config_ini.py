"""The one reader and writer of ``config.ini``, in the dialect of FasterTransformer's ``3rdparty/INIReader.h``.

- A line that begins with ``;`` or ``#`` is a comment, and so is what follows ``;`` behind a white space.
  FasterTransformer ignores ``#`` and the rest behind a number too, where strtol stops; here that is a comment behind
  every value.
- Names of sections and keys are the same in upper and lower case. ``=`` or ``:`` follows a key.
- A section that is given twice is one section.
- A key that is given twice, or is continued in an indented line, has all its values, joined by line feeds. So the first
  number counts, and a word or a flag given twice is none that is legal. FasterTransformer takes the default in that
  case; here it is refused.
- A line that is none of these is refused with its number; FasterTransformer skips it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ft_format.values import Values
from models.checks import Refusal

FILE_NAME = "config.ini"
Sections = Mapping[str, Mapping[str, object]]
"""Content of a config.ini to be written: section, key, value."""

_COMMENTS = (";", "#")
_BYTE_ORDER_MARK = "\ufeff"
_HINT = "correct the file, or convert the checkpoint again"


class ConfigIniError(Exception):
    """A config.ini is missing, malformed or incomplete; layers with an error of their own give that to the reader."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(f"{problem}; {hint}" if hint else problem)
        self.problem, self.hint = problem, hint


class ConfigIni(dict[str, Values]):
    """The sections of a config.ini by name in lower case; one that is not there is refused with those that are.

    Args:
        content: of the file.
        path: of the file, for messages.
        error: makes the exception for everything that is refused, now and when a value is read.
    """

    def __init__(self, content: bytes, path: Path | str, error: Refusal = ConfigIniError) -> None:
        self._path, self._error = path, error
        sections = self._parse(content)
        super().__init__({name: Values(f"{path}: [{name}]", keys, error, _HINT) for name, keys in sections.items()})

    @classmethod
    def read(cls, directory: Path, error: Refusal = ConfigIniError) -> ConfigIni:
        """Read ``directory/config.ini``; raise the given error if it cannot be read."""
        path = directory / FILE_NAME
        try:
            return cls(path.read_bytes(), path, error)
        except FileNotFoundError:
            hint = "the directory of the shards must hold it: correct the path, or convert the checkpoint again"
            raise error(f"{path} is missing", hint) from None
        except OSError as problem:
            raise error(
                f"{path} cannot be read: {problem.strerror}", "see whether its file system is healthy"
            ) from None

    def __missing__(self, name: str) -> Values:
        raise self._error(f"{self._path} has no section [{name}]; it has {list(self)}", _HINT)

    def optional(self, name: str) -> Values:
        """Return a section; an empty one where it is not there."""
        return self[name] if name in self else Values(f"{self._path}: [{name}]", {}, self._error, _HINT)

    def first(self, names: Iterable[str]) -> Values | None:
        """Return the first of the sections that is there; None: there is none."""
        return next((self[name] for name in names if name in self), None)

    def with_key(self, key: str) -> Values | None:
        """Return the first section, in the order of the file, that has a key; None: there is none."""
        return next((section for section in self.values() if key in section), None)

    def _parse(self, content: bytes) -> dict[str, dict[str, str]]:
        try:
            lines = content.decode().removeprefix(_BYTE_ORDER_MARK).split("\n")
        except UnicodeDecodeError as error:
            raise self._error(f"{self._path} cannot be read: {error}", _HINT) from None
        sections: dict[str, dict[str, str]] = {}
        section, key = None, ""
        for number, line in enumerate(lines, 1):
            text = _without_comment(line).strip()
            if not text:
                continue
            if section is not None and key and line[0].isspace():
                value = text
            elif text.startswith("["):
                section, key = sections.setdefault(self._section_name(number, text), {}), ""
                continue
            else:
                key, value = self._key_and_value(number, text, section is not None)
            assert section is not None
            section[key] = f"{section[key]}\n{value}" if section.get(key) else value
        return sections

    def _section_name(self, number: int, text: str) -> str:
        name, bracket, _ = text[1:].partition("]")
        if not bracket:
            raise self._refused(number, text, "the name of a section ends with ]")
        return name.lower()

    def _key_and_value(self, number: int, text: str, is_in_section: bool) -> tuple[str, str]:
        places = [place for place in map(text.find, "=:") if place >= 0]
        if not places:
            raise self._refused(number, text, "legal lines are [section], key = value and ; comment")
        if not is_in_section:
            raise self._refused(number, text, "a [section] must stand before the first key")
        return text[: min(places)].rstrip().lower(), text[min(places) + 1 :].strip()

    def _refused(self, number: int, text: str, legal: str) -> Exception:
        return self._error(f"{self._path} cannot be read: line {number} is '{text[:80]}'; {legal}", _HINT)


def _without_comment(line: str) -> str:
    """Cut a comment off a line: from the first sign of one that stands first or behind a white space."""
    for place, sign in enumerate(line):
        if sign in _COMMENTS and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    return line


def render(*contents: Sections) -> str:
    """Render a config.ini; of several contents the later ones add sections and keys, and replace values.

    Raises:
        ConfigIniError: a value would be read back as another one.
    """
    sections: dict[str, dict[str, str]] = {}
    for content in contents:
        for section, entries in content.items():
            keys = sections.setdefault(section, {})
            keys.update((key.lower(), str(value)) for key, value in entries.items())
    lines: list[str] = []
    for section, keys in sections.items():
        lines += [f"[{section}]", *(f"{key} = {value}".replace("\n", "\n\t") for key, value in keys.items()), ""]
    text = "\n".join([*lines, ""])
    read_back = {section: values.texts for section, values in ConfigIni(text.encode(), FILE_NAME).items()}
    if read_back != sections:
        raise ConfigIniError(f"{FILE_NAME} cannot hold {sections}", "names and values must not contain ' ;' or ' #'")
    return text
