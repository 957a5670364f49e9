"""NeMo's published configurations, file by file: both targets compute what NeMo computes under each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.tiny_models.published_configs import assert_both_targets_compute_what_nemo_computes, published

ROOTS = [Path(root) for root in os.environ["NEMO_CONFIGS"].split(":")]
PATTERNS = (
    "launcher_scripts/conf/training/{}/*.yaml",
    "examples/nlp/language_modeling/conf/megatron_{}_config.yaml",
)
FAMILIES = ("llama", "mistral", "mixtral", "nemotron", "qwen2", "starcoder2", "gemma", "gemma2")
FILES = [
    file
    for root in ROOTS
    for pattern in PATTERNS
    for family in FAMILIES
    for file in sorted(root.glob(pattern.format(family)))
]


def test_there_are_files() -> None:
    assert FILES, f"{ROOTS} hold none of {PATTERNS}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_tiny_model_under_it(file: Path, tmp_path: Path) -> None:
    assert_both_targets_compute_what_nemo_computes(published(file), tmp_path)
