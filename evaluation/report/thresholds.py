"""The gate's file of limits. It is read on the login side too, so nothing heavy is imported here."""

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


def read_thresholds(path: Path) -> dict[str, dict[str, float]]:
    """Read the YAML file.

    Raises:
        ConfigError: it cannot be read, holds nothing, an unknown rule or something that is no number.
    """
    try:
        content: Any = yaml.safe_load(read_text(path, SETTINGS_BYTES))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    thresholds = content.get("thresholds") if isinstance(content, dict) else None
    if not isinstance(thresholds, dict) or not thresholds:
        raise ConfigError(f"{path} has no thresholds", "write thresholds: {<figure>: {at_least: <number>}}")
    for figure, rules in thresholds.items():
        if not isinstance(rules, dict) or not rules:
            raise ConfigError(f"{path}: {figure} has no rule", nearest("", [*FLOORS, *CEILINGS]))
        for rule, number in rules.items():
            if rule not in FLOORS and rule not in CEILINGS:
                raise ConfigError(f"{path}: {figure}: there is no rule '{rule}'", nearest(rule, [*FLOORS, *CEILINGS]))
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
                raise ConfigError(f"{path}: {figure}: {rule} is {number!r}", "it is a number")
    return thresholds
