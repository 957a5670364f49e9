"""docs/add_a_model_family.md, followed to the letter in a copy of the sources."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.decoder_forward import forward
from support.huggingface_models import logits, save

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/add_a_model_family.md").read_text("utf-8")
INPUT_IDS = np.array([[11, 3, 95, 0, 42, 17, 17, 8]])


def blocks(kind: str) -> list[tuple[str, list[str]]]:
    """Blocks of code of one kind: what follows the mark in the first line, and the other lines."""
    found = re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [(block.splitlines()[0].removeprefix("# "), block.splitlines()[1:]) for block in found]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with the text's changes."""
    root = tmp_path_factory.mktemp("sources")
    for package in ("export_scripts", "ft_format", "handover", "models"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path, lines in blocks("python"):
        assert not (root / path).exists(), "the text adds a file"
        (root / path).write_text("\n".join(lines) + "\n")
    for path, lines in blocks("diff"):
        change(root / path, lines)
    return root


def change(path: Path, lines: list[str]) -> None:
    """Apply the lines of a diff: a line that stays or goes is there once, an added one follows it."""
    content = path.read_text()
    for before, line in zip(lines, [*lines[1:], ""], strict=True):
        if before[0] in " -":
            assert content.count(before[1:] + "\n") == 1, before
            replacement = [before[1:]] if before[0] == " " else []
            replacement += [line[1:]] if line.startswith("+") else []
            content = content.replace(before[1:], "\n".join(replacement))
    path.write_text(content)


def test_the_added_code_is_clean(copy: Path) -> None:
    """As ``make check`` demands."""
    files = [path for kind in ("python", "diff") for path, _ in blocks(kind)]
    shutil.copy(ROOT / "pyproject.toml", copy)
    for check in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        done = run(copy, "-m", "ruff", *check, *files)
        assert done.returncode == 0, done.stdout


def run(copy: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], cwd=copy, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_added_family_computes_transformers_logits(copy: Path, ranks: int, tmp_path: Path) -> None:
    model = save("codegen", tmp_path / "codegen")
    line = blocks("shell")[0][0]
    command = line.replace("--checkpoint=codegen", f"--checkpoint={tmp_path / 'codegen'}")
    command = command.replace("--output=2-gpu", f"--output={tmp_path}/{ranks}-gpu").replace("size=2", f"size={ranks}")
    done = run(copy, *shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    assert np.abs(forward(tmp_path / f"{ranks}-gpu", INPUT_IDS) - logits(model, INPUT_IDS)).max() < 1e-4


def test_without_the_change_it_is_refused(tmp_path: Path) -> None:
    save("codegen", tmp_path / "codegen")
    argv = ["--checkpoint=codegen", "--output=1-gpu", "--tensor-para-size=1", "--weight-data-type=fp32"]
    done = subprocess.run(
        [sys.executable, "-m", "export_scripts.convert", *argv], cwd=tmp_path, capture_output=True, text=True,
        timeout=60, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode != 0
    assert "model_type 'codegen' has no table here" in done.stderr


def test_the_table_is_short_and_every_file_that_the_text_names_is_there() -> None:
    ((_, table),) = blocks("python")
    rules = [line for line in table if line.strip()]
    assert len(rules) < 75
    for name in re.findall(r"`(huggingface_\w+\.py|megatron_gpt\.py|gptj_slim\.py|formats\.py)`", TEXT):
        folder = "checkpoints" if name in ("formats.py", "gptj_slim.py") else "weights"
        known = (ROOT / "export_scripts" / folder / name).exists() or (ROOT / "tests/support" / name).exists()
        assert known, name
