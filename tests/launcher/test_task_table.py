"""An evaluation is its program with its arguments, and a line in ``TASKS``; the launcher makes the rest from these."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
PROGRAM = '''
"""Count words in what a model answers."""

from dataclasses import dataclass, field
from pathlib import Path

from evaluation.arguments import TaskArguments
from handover.errors import ConfigError
from handover.ranges import BEAMS, RANGE


@dataclass(frozen=True)
class ToyArguments(TaskArguments):
    """Count words."""

    longest: int = field(default=7, metadata={RANGE: BEAMS, "help": "letters of a word at most"})
    words: tuple[str, ...] = field(default=("a",), metadata={"help": "JSON list of words to count"})
    stop_words: Path | None = field(default=None, metadata={"help": "file of words that are left out"})


def check_files(arguments, converted):
    if not arguments.data_path.is_file():
        raise ConfigError(f"there is no file {arguments.data_path}")
'''
LINE = "task_table.TASKS['toy'] = task_table.Task(toy.ToyArguments, toy.check_files)"


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """main.py of a project that has both places."""
    directory = tmp_path_factory.mktemp("toy")
    (directory / "toy.py").write_text(PROGRAM)
    (directory / "text.txt").write_text("a b a\n")
    place = f"evaluation.__path__.append({str(directory)!r})"
    run = f"runpy.run_path({str(PROJECT / 'main.py')!r}, run_name='__main__')"
    imports = "import runpy, evaluation", place, "from evaluation import task_table, toy"
    (directory / "main.py").write_text("\n".join([*imports, LINE, run]))
    return directory


def start(extended: Path, *words: str) -> subprocess.CompletedProcess[str]:
    given = ("stages=[evaluate]", "evaluation=toy", "deployment.endpoint=server:8001", "cluster_type=interactive")
    command = [sys.executable, str(extended / "main.py"), *given, "dry_run=true", *words]
    return subprocess.run(command, cwd=PROJECT, env={"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True)


def test_a_task_has_keys_a_plan_and_help_by_two_places(extended: Path) -> None:
    data = f"evaluation.toy.data_path={extended}/text.txt"
    ended = start(extended, data, "evaluation.toy.longest=3", "evaluation.toy.words=[a,b]")
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("$ ") and "evaluation.toy" in line]
    assert f"--data-path={extended}/text.txt" in line and "--longest=3" in line and """'--words=["a", "b"]'""" in line
    assert "--stop-words" not in line and "--batch-size=16 " in line
    assert (
        "evaluation: consistency, divergence, lambada, monitor, parity, squad, summarization, toy, translation"
        in start(extended, "--help").stdout
    )


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("evaluation.toy.samples=1", "evaluation.toy.data_path is not set"),
        ("evaluation.toy.longest=0", "evaluation.toy.longest is 0"),
        ("evaluation.toy.longst=1", "did you mean 'longest'?"),
    ],
)
def test_what_is_wrong_with_its_keys_is_said(extended: Path, setting: str, said: str) -> None:
    ended = start(extended, setting)
    assert ended.returncode == 1 and said in ended.stderr, ended.stderr
