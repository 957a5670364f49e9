"""Every numeric key of the configuration, and every numeric flag of the programs, has a range that is enforced."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
import types
import typing
from collections.abc import Iterator
from typing import Any

import hydra
import pytest

from handover.arguments import ScriptArguments
from handover.errors import ConfigError
from handover.ranges import RANGE
from launcher.config.schema import PROJECT_DIR, Config, register, to_typed
from launcher.config.values import check_values

NONSENSE = [-1, -2147483649, 2147483648, 2**63, math.nan, math.inf, -math.inf]
"""What no number of a deployment is: no key counts, measures or limits anything by these."""
ARGUMENTS = [
    "evaluation.arguments",
    "evaluation.speed.load_arguments",
    "evaluation.parity.arguments",
    "deployment.arguments",
]


def has_number(hint: Any) -> bool:
    if typing.get_origin(hint) in (list, tuple, types.UnionType, typing.Union):
        return any(map(has_number, typing.get_args(hint)))
    return hint in (int, float)


def numeric_keys(section: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all keys that hold numbers, in a configuration that has all its sections."""
    for name, hint in typing.get_type_hints(type(section)).items():
        value = getattr(section, name)
        if has_number(hint):
            yield (*place, name)
        elif dataclasses.is_dataclass(value):
            yield from numeric_keys(value, (*place, name))
        elif isinstance(value, dict):
            for key, one in value.items():
                if dataclasses.is_dataclass(one):
                    yield from numeric_keys(one, (*place, name, key))


@pytest.fixture(scope="module")
def config() -> Config:
    """A sound run with every evaluation."""
    register()
    every = "evaluation=[lambada,squad,translation,summarization,parity]"
    with hydra.initialize_config_dir(str(PROJECT_DIR / "conf"), version_base="1.3"):
        return to_typed(hydra.compose("config", overrides=[every]))


def with_number(config: Config, path: tuple[str, ...], number: float) -> Config:
    """A copy of a configuration with another number, also where it stands in lists."""
    changed = copy.deepcopy(config)
    section: Any = changed
    for name in path[:-1]:
        section = section[name] if isinstance(section, dict) else getattr(section, name)
    hint = typing.get_type_hints(type(section))[path[-1]]
    depth = str(hint).count("list[")
    value: Any = number
    for _ in range(depth):
        value = [value]
    setattr(section, path[-1], value)
    return changed


def test_a_sound_configuration_passes(config: Config) -> None:
    check_values(config)


def test_every_numeric_key_refuses_what_is_no_number_of_its_kind(config: Config) -> None:
    keys = list(numeric_keys(config))
    assert len(keys) > 60 and ("evaluation", "parity", "limits", "bf16", "tie") in keys
    taken = []
    for path in keys:
        for number in NONSENSE:
            try:
                check_values(with_number(config, path, number))
                taken.append(f"{'.'.join(path)}={number}")
            except ConfigError as refused:
                assert ".".join(path) in refused.problem and refused.hint.startswith("it is "), refused
    assert not taken, f"{len(taken)} of {len(keys) * len(NONSENSE)}"


def test_the_bounds_themselves_are_legal(config: Config) -> None:
    for path in numeric_keys(config):
        section: Any = config
        for name in path[:-1]:
            section = section[name] if isinstance(section, dict) else getattr(section, name)
        (entry,) = (entry for entry in dataclasses.fields(section) if entry.name == path[-1])
        allowed = entry.metadata[RANGE]
        is_whole = "int" in str(typing.get_type_hints(type(section))[path[-1]])
        least = (allowed.least + 1) if allowed.is_above else allowed.least
        for number in (least, allowed.most):
            check_values(with_number(config, path, int(number) if is_whole else float(number)))


def script_arguments() -> Iterator[type[ScriptArguments]]:
    for name in [*ARGUMENTS, "export_scripts.arguments"]:
        for found in vars(importlib.import_module(name)).values():
            if isinstance(found, type) and issubclass(found, ScriptArguments) and found.__module__ == name:
                yield found


@pytest.mark.parametrize("kind", list(script_arguments()), ids=lambda kind: kind.__name__)
def test_every_numeric_flag_refuses_what_is_no_number_of_its_kind(kind: type[ScriptArguments]) -> None:
    hints = typing.get_type_hints(kind)
    sample = {str: "fp16", bool: "true", int: "1", float: "1", tuple[str, ...]: '["x"]'}
    required = [
        f"--{entry.name.replace('_', '-')}={sample.get(hints[entry.name], 'x')}"
        for entry in dataclasses.fields(kind)
        if entry.default is entry.default_factory is dataclasses.MISSING and not entry.metadata.get("positional")
    ]
    positional = ["x" for entry in dataclasses.fields(kind) if entry.metadata.get("positional")]
    assert kind.from_argv([*required, *positional])
    for entry in dataclasses.fields(kind):
        hint = hints[entry.name]
        if not has_number(hint) or entry.name == "limits":  # parity's limits have names, checked one by one
            continue
        assert RANGE in entry.metadata, f"{kind.__name__}.{entry.name} declares no range"
        deep = {"lengths": "[[{}, 1]]", "slos": '[["ttft", {}]]'}.get(
            entry.name, "[{}]" if "tuple" in str(hint) else "{}"
        )
        beyond = str(max(2**31, int(entry.metadata[RANGE].most) + 1))
        for number in ("-1", beyond, *(("NaN", "Infinity") if "float" in str(hint) else ())):
            flag = f"--{entry.name.replace('_', '-')}={deep.format(number)}"
            with pytest.raises(ConfigError, match=entry.name):
                kind.from_argv([*required, *positional, flag])
