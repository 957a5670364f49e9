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
from support.shards.decoder_forward import forward
from support.tiny_models import llama_models
from support.tiny_models.huggingface_models import logits, save

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/add_a_model_family.md").read_text("utf-8")
INPUT_IDS = np.array([[11, 3, 95, 0, 42, 17, 17, 8]])


def blocks(kind: str) -> list[tuple[str, list[str]]]:
    """Blocks of code of one kind: what follows the mark in the first line, and the other lines."""
    found = re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [(block.splitlines()[0].removeprefix("# "), block.splitlines()[1:]) for block in found]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources without what the text adds: OLMo 2 is in the tree, and the text is what it took."""
    root = tmp_path_factory.mktemp("before")
    for package in ("export_scripts", "ft_format", "handover", "models"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path, lines in blocks("python"):
        if (root / path).exists():
            assert (root / path).read_text() == "\n".join(lines) + "\n", "the text shows the file as it is"
            (root / path).unlink()
    for path, lines in blocks("diff"):
        content = (root / path).read_text()
        for line in lines:
            if line.startswith("+") and f"\n{line[1:]}\n" in content:
                content = content.replace(f"{line[1:]}\n", "")
        (root / path).write_text(content)
    return root


@pytest.fixture(scope="module")
def copy(before: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with the text's changes."""
    root = tmp_path_factory.mktemp("sources")
    shutil.copytree(before, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
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
            assert content.count(f"{before[1:]}\n") == 1, before
            replacement = [before[1:]] if before[0] == " " else []
            replacement += [line[1:]] if line.startswith("+") else []
            content = content.replace(f"{before[1:]}\n", "".join(f"{each}\n" for each in replacement))
    path.write_text(content)


def test_the_added_code_is_clean(copy: Path) -> None:
    """As ``make check`` demands."""
    files = [path for kind in ("python", "diff") for path, _ in blocks(kind)]
    shutil.copy(ROOT / "pyproject.toml", copy)
    for check in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        done = run(copy, "-m", "ruff", *check, *files)
        assert done.returncode == 0, done.stdout


def run(copy: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], cwd=copy, capture_output=True, text=True, timeout=180)


def converted(copy: Path, number: int, source: Path, output: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the text's command of a number, with other paths."""
    line = blocks("shell")[number][0]
    words = dict(word.split("=") for word in shlex.split(line) if "=" in word)
    words |= {"--checkpoint": str(source), "--output": str(output), **changes}
    return run(copy, "-m", "export_scripts.convert", *(f"{key}={value}" for key, value in words.items()))


def test_the_added_decoder_is_written_as_transformers_loads_it(copy: Path, before: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = llama_models.save("olmo2", tmp_path / "olmo2")
    refused = converted(before, 0, tmp_path / "olmo2", tmp_path / "none")
    assert refused.returncode != 0
    assert "model_type 'olmo2' has no table here" in refused.stderr
    done = converted(copy, 0, tmp_path / "olmo2", tmp_path / "hub")
    assert done.returncode == 0, done.stderr
    made, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hub", attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    assert np.array_equal(llama_models.logits(made.eval()), llama_models.logits(model))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_added_family_computes_transformers_logits(copy: Path, ranks: int, tmp_path: Path) -> None:
    model = save("codegen", tmp_path / "codegen")
    output = tmp_path / f"{ranks}-gpu"
    done = converted(copy, 1, tmp_path / "codegen", output, **{"--tensor-para-size": str(ranks)})
    assert done.returncode == 0, done.stderr
    assert np.abs(forward(output, INPUT_IDS) - logits(model, INPUT_IDS)).max() < 1e-4


def test_without_the_change_it_is_refused(before: Path, tmp_path: Path) -> None:
    save("codegen", tmp_path / "codegen")
    done = converted(before, 1, tmp_path / "codegen", tmp_path / "1-gpu")
    assert done.returncode != 0
    assert "model_type 'codegen' has no table here" in done.stderr


def test_the_table_is_short_and_every_file_that_the_text_names_is_there() -> None:
    (_, architecture), (_, table) = blocks("python")
    assert len([line for line in architecture if line.strip()]) < 25
    assert len([line for line in table if line.strip()]) < 75
    for name in re.findall(r"`(huggingface_\w+\.py|megatron_gpt\.py|gptj_slim\.py|formats\.py)`", TEXT):
        folder = "checkpoints" if name in ("formats.py", "gptj_slim.py") else "weights"
        known = (ROOT / "export_scripts" / folder / name).exists() or (
            ROOT / "tests/support/tiny_models" / name
        ).exists()
        assert known, name
