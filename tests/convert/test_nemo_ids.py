"""Ids of NeMo's tokenizers: ours against NeMo's recorded answers, and NeMo's own where they are installed."""

from __future__ import annotations

import configparser
import json
import sys
from pathlib import Path

import pytest
from support.checkpoints.nemo_archive import NEMO
from support.measurements.nemo_tokenizer_cases import CASES, RECORDED, our_answer, write_files

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert


@pytest.mark.parametrize("name", CASES)
def test_ours_says_what_nemo_said(name: str, tmp_path: Path) -> None:
    assert our_answer(CASES[name], write_files(CASES[name], tmp_path)) == json.loads(RECORDED.read_text())[name]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of NeMo's name whose tokenizers say 41 and 42."""
    root = tmp_path / "site"
    package = root / "nemo/collections/common"
    package.mkdir(parents=True)
    (package / "tokenizers.py").write_text(
        "class AutoTokenizer:\n"
        "    bos_id, eos_id, tokenizer = 41, 42, ()\n"
        "    def __init__(self, pretrained_model_name, vocab_file, merges_file):\n"
        "        open(vocab_file).close()\n"
    )
    (root / "nemo_toolkit-3.0.0.dist-info").mkdir()
    (root / "nemo_toolkit-3.0.0.dist-info/METADATA").write_text("Name: nemo_toolkit\nVersion: 3.0.0\n")
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(root))
    return package / "tokenizers.py"


def ids_of(tmp_path: Path) -> tuple[int, int]:
    convert(ConvertArguments(NEMO / "gpt122_tp1_pp1.nemo", tmp_path / "out", 1, "fp32"))
    parser = configparser.ConfigParser()
    parser.read(tmp_path / "out/config.ini")
    return parser["gpt"].getint("start_id"), parser["gpt"].getint("end_id")


def test_nemos_ids_are_used_where_nemo_is_installed(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ids_of(tmp_path) == (41, 42)
    assert "NeMo's tokenizer says" in capsys.readouterr().err


def test_a_broken_nemo_is_reported_and_not_needed(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.write_text("import a_module_that_is_not_there\n")
    assert ids_of(tmp_path) == (0, 0)
    assert "No module named 'a_module_that_is_not_there'" in capsys.readouterr().err
