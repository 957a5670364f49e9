"""The gate's file of limits. The login node imports this module too: nothing but yaml."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from handover.errors import ConfigError, nearest
from handover.regular_file import SETTINGS_BYTES, read_text

_Limit = Callable[[float, float], float]

# Limit that a value must not pass, from the number in the file and the baseline's value.
FLOORS: dict[str, _Limit] = {
    "at_least": lambda number, base: number,
    "max_drop": lambda number, base: base - number,
    "max_drop_percent": lambda number, base: base * (1 - number / 100),
}
CEILINGS: dict[str, _Limit] = {
    "at_most": lambda number, base: number,
    "max_rise": lambda number, base: base + number,
    "max_rise_percent": lambda number, base: base * (1 + number / 100),
}


def read_limits(path: Path, key: str, hint: str) -> dict[str, Any]:
    """Read a YAML file with a mapping of limits under a key.

    Raises:
        ConfigError: the file cannot be read, or has no such mapping.
    """
    try:
        content: Any = yaml.safe_load(read_text(path, SETTINGS_BYTES))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get(key), dict) or not content[key]:
        raise ConfigError(f"{path} has no {key}", hint)
    return content


def read_thresholds(path: Path) -> dict[str, dict[str, float]]:
    """Read the YAML file.

    Raises:
        ConfigError: the file cannot be read, has no limits or an unknown rule, or a limit is not a number.
    """
    content = read_limits(path, "thresholds", "write thresholds: {<figure>: {at_least: <number>}}")
    thresholds: dict[str, dict[str, float]] = content["thresholds"]
    for figure, rules in thresholds.items():
        if not isinstance(rules, dict) or not rules:
            raise ConfigError(f"{path}: {figure} has no rule", nearest("", [*FLOORS, *CEILINGS]))
        for rule, number in rules.items():
            if rule not in FLOORS and rule not in CEILINGS:
                raise ConfigError(f"{path}: {figure}: there is no rule '{rule}'", nearest(rule, [*FLOORS, *CEILINGS]))
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
                raise ConfigError(f"{path}: {figure}: {rule} is {number!r}", "it is a number")
    return thresholds
