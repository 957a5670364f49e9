"""A key that a script takes under the same name has the type of the script's argument, as OmegaConf can hold it."""

from __future__ import annotations

import ast
import typing
from pathlib import Path
from types import ModuleType

import pytest
from support.runs.composed import compose

from handover.errors import ConfigError
from launcher.config import deployment, export, schema
from launcher.config.options import key_type
from launcher.plan.paths import RunPaths
from launcher.plan.stages.benchmark import load_arguments

SHARED = [
    (module, section.name, entry.target.id, entry.value.args[0].id, entry.value.args[1].value)
    for module in (schema, deployment, export)
    for section in ast.parse(Path(str(module.__file__)).read_text()).body
    if isinstance(section, ast.ClassDef)
    for entry in section.body
    if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(entry.value, ast.Call)
    if isinstance(entry.value.func, ast.Name) and entry.value.func.id == "same"
    if isinstance(entry.value.args[0], ast.Name) and isinstance(entry.value.args[1], ast.Constant)
]


def test_the_keys_are_found() -> None:
    assert len(SHARED) > 40


@pytest.mark.parametrize(
    ("module", "section", "key", "arguments", "name"), SHARED, ids=lambda part: getattr(part, "__name__", part)
)
def test_a_shared_key_has_its_arguments_type(
    module: ModuleType, section: str, key: str, arguments: str, name: str
) -> None:
    hints = typing.get_type_hints(getattr(module, arguments))
    assert name in (key, f"{section.removesuffix('Config').lower()}_{key}")  # a section's name may stand before it
    assert typing.get_type_hints(getattr(module, section))[key] == key_type(hints[name])


@pytest.mark.parametrize(
    "key",
    [
        *("evaluation.parity.data_path", "evaluation.squad.prompt", "evaluation.translation.reference_path"),
        *("benchmark.load.trace", "benchmark.load.prompt_file", "deployment.api_keys_file"),
    ],
)
def test_an_empty_path_is_refused_as_the_text_of_an_unset_variable(key: str) -> None:
    """What a user wanted to be read would otherwise be left out without a word."""
    schema.register()
    with pytest.raises(ConfigError, match=f"^{key} is empty"):
        compose(["evaluation=[parity,squad,translation]", f"{key}="])


def test_a_file_below_a_user_who_does_not_exist_is_a_file_that_is_not_there() -> None:
    schema.register()
    config = compose(["benchmark=load", 'benchmark.load.trace="~no-such-user/trace.jsonl"'])
    assert load_arguments(config, RunPaths.of(config)).trace == Path("~no-such-user/trace.jsonl").absolute()
