"""A key of ``config.json``, or several that say one thing, and the fields of the description that they stand for.

A field is named by its block: ``attention.head_num``; see ``Decoder.fields``. What one direction reads, the other
writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from models.checks import shown
from models.config_json import ConfigJson

Fields = Mapping[str, Any]
"""A description, or a part of one, by the names of its fields."""


class Keys(ABC):
    """Keys of ``config.json`` that belong together.

    Attributes:
        of_some: they are of a block that some models of the architecture have not.
    """

    of_some: ClassVar[bool] = False

    @property
    @abstractmethod
    def says(self) -> tuple[str, ...]:
        """The fields that they stand for."""

    @abstractmethod
    def read(self, config: ConfigJson) -> dict[str, Any]:
        """Read the fields.

        Raises:
            ModelError: a value that no model can have.
        """

    @abstractmethod
    def write(self, fields: Fields) -> dict[str, Any]:
        """Write the keys."""

    def problems(self, config: ConfigJson) -> list[str]:
        """List keys that say what no field stands for, ``key: value  (reason)`` a line each."""
        return []

    def lacks(self, fields: Fields) -> list[str]:
        """List fields that these keys cannot say, ``field: value  (reason)`` a line each."""
        return []


@dataclass(frozen=True)
class Key(Keys):
    """One key that stands for one field.

    Attributes:
        kind: reads the value.
        unset: what is written where the field says that nothing is known, 0.
    """

    key: str
    field: str
    kind: Callable[[ConfigJson, str], Any] = ConfigJson.size
    unset: Any = 0

    @property
    def says(self) -> tuple[str, ...]:
        return (self.field,)

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return {self.field: self.kind(config, self.key)}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {self.key: fields[self.field] or self.unset}


@dataclass(frozen=True)
class OfBlock(Keys):
    """Keys of a block that some models have not: they say nothing there, and are not written.

    Attributes:
        keys: those keys.
        is_there: whether a configuration has the block.
    """

    block: str
    keys: tuple[Keys, ...]
    is_there: Callable[[ConfigJson], bool]
    of_some: ClassVar[bool] = True

    @property
    def says(self) -> tuple[str, ...]:
        return tuple(name for keys in self.keys for name in keys.says)

    def read(self, config: ConfigJson) -> dict[str, Any]:
        if not self.is_there(config):
            return {}
        return {name: value for keys in self.keys for name, value in keys.read(config).items()}

    def write(self, fields: Fields) -> dict[str, Any]:
        if not self._has(fields):
            return {}
        return {key: value for keys in self.keys for key, value in keys.write(fields).items()}

    def problems(self, config: ConfigJson) -> list[str]:
        return [each for keys in self.keys for each in keys.problems(config)] if self.is_there(config) else []

    def lacks(self, fields: Fields) -> list[str]:
        return [each for keys in self.keys for each in keys.lacks(fields)] if self._has(fields) else []

    def _has(self, fields: Fields) -> bool:
        return any(name.startswith(f"{self.block}.") for name in fields)


@dataclass(frozen=True)
class Constants(Keys):
    """Keys of which one value alone is followed; transformers reads them of no file, other engines do."""

    values: Mapping[str, Any]
    says: ClassVar[tuple[str, ...]] = ()

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return {}

    def write(self, fields: Fields) -> dict[str, Any]:
        return dict(self.values)

    def problems(self, config: ConfigJson) -> list[str]:
        found = {key: config[key] for key, legal in self.values.items() if config.get(key) not in (None, legal)}
        return [f"{key}: {shown(value)}  (it is {self.values[key]})" for key, value in found.items()]


def flag(config: ConfigJson, key: str) -> bool:
    """Read a key that is true or false; null is false."""
    return bool(config.get(key))
