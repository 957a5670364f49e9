"""Arguments that make no sense: each ends with a message, in bounded time, and removes nothing.

The programs run for real, so no odd value is a path outside the test's own directory: a pipe stands for devices.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import random
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.torture.campaign import Campaign, Tally

from handover.arguments import ScriptArguments
from handover.errors import SlipwayError

MODULES = {  # a program, and where its arguments are declared
    **{f"evaluation.{name}": "evaluation.arguments" for name in ("lambada", "squad", "translation", "summarization")},
    **{f"evaluation.{name}": "evaluation.arguments" for name in ("benchmark", "report.write", "gate", "sweep_report")},
    **{f"deployment.{name}": "deployment.arguments" for name in ("serve", "gemm_autotune")},
    **{f"export_scripts.{name}": "export_scripts.arguments" for name in ("convert", "export")},
    **{
        "evaluation.load": "evaluation.speed.load_arguments",
        "evaluation.parity.run": "evaluation.parity.arguments",
    },
}
ODD = [
    *("", "x", "-1", "null", "[]", "[[]]", "[1]", '["a"]', '{"a":1}', "[[1,2,3]]", '[[["a"]]]', "[" * 5000, "1e400"),
    *("nan", "pipe", ".", "\udcff", "a" * 5000, "9" * 5000, "127.0.0.1:1", "é\n", "0", "0,9"),
]
TYPICAL = {str: "127.0.0.1:1", bool: "true", int: "1", float: "1"}


def arguments_of(program: str) -> type[ScriptArguments]:
    """The dataclass of a program: the one that its module imports."""
    declared = vars(importlib.import_module(MODULES[program])).values()
    kinds = [kind for kind in declared if isinstance(kind, type) and issubclass(kind, ScriptArguments)]
    used = vars(importlib.import_module(program))
    (kind,) = (kind for kind in kinds if kind.__module__ == MODULES[program] and kind.__name__ in used)
    return kind


def attempts() -> Iterator[tuple[str, list[str]]]:
    """Each flag of each program with each odd value, while the others are such that nothing can be done."""
    for program in MODULES:
        kind = arguments_of(program)
        entries, hints = dataclasses.fields(kind), typing.get_type_hints(kind)
        needed = [entry for entry in entries if entry.default is entry.default_factory is dataclasses.MISSING]
        given = {entry.name: TYPICAL.get(hints[entry.name], "nowhere") for entry in needed}
        for entry in entries:
            for odd in ODD:
                words = {**given, entry.name: odd}
                positional = [word for word in entries if word.metadata.get("positional") and word.name in words]
                flags = [
                    f"--{name.replace('_', '-')}={words[name]}"
                    for name in words
                    if name not in {word.name for word in positional}
                ]
                yield program, [*flags, *(words[word.name] for word in positional)]


@pytest.mark.usefixtures("capsys")
def test_odd_arguments(campaign: Campaign, tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    every = list(attempts())
    for program, argv in random.Random(7).sample(every, campaign.trials(150, len(every))):
        try:
            importlib.import_module(program).main(argv)
            tally.record()
        except (SlipwayError, OSError, SystemExit):  # all of which the program words
            tally.record()
        except BaseException as error:
            tally.record(f"{program} {[word[:60] for word in argv]}: {error!r:.200}")
        assert Path("pipe").is_fifo(), f"{program} {argv} replaced what is no file"
    tally.check()
