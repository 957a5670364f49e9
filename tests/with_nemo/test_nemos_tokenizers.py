"""NeMo's own tokenizers against ours: special ids, the size of the vocabulary, and the ids of texts.

NEMO_RECORD=1 pytest tests/with_nemo        writes tests/data/nemo_tokenizers.json again
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.measurements.nemo_tokenizer_cases import CASES, RECORDED, TEXTS, our_answer, write_files

from export_scripts.conversion.plan.nemo_ids import NemoIdsArguments, ask_nemo, nemos_answer


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        directory = write_files(case, tmp_path_factory.mktemp("case"))
        found[name] = nemos_answer(NemoIdsArguments(directory, case.library, case.is_legacy), TEXTS)
    if os.environ.get("NEMO_RECORD"):
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")
    return found


@pytest.mark.parametrize("name", CASES)
def test_ours_says_what_nemo_says(name: str, answers: dict[str, Any], tmp_path: Path) -> None:
    assert our_answer(CASES[name], write_files(CASES[name], tmp_path)) == answers[name]


def test_the_recorded_answers_are_nemos(answers: dict[str, Any]) -> None:
    """The suite without NeMo compares with these."""
    assert json.loads(RECORDED.read_text()) == answers


def test_a_process_of_its_own_says_the_same(answers: dict[str, Any], tmp_path: Path) -> None:
    directory = write_files(CASES["bpe"], tmp_path)
    assert ask_nemo(NemoIdsArguments(directory, "bpe", False), TEXTS) == answers["bpe"]
