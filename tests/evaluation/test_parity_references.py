"""A source without shards is computed by transformers' class, on weights that are read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints.llama_sources import Case, write_source
from support.tiny_models.llama_models import input_ids

from evaluation.parity.references import open_reference

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize(
    ("name", "form", "wanted"),
    [
        ("qwen3_moe", "Bridge, layers apart", "auto"),
        ("deepseek_v3", "Megatron-LM, torch_dist, layers apart", "huggingface"),
    ],
)
def test_a_source_without_shards_scores_as_the_model_it_was_written_from(
    name: str, form: str, wanted: str, tmp_path: Path
) -> None:
    case = Case(name, form)
    reference, _ = open_reference(write_source(case, tmp_path / "source"), wanted, tmp_path / "scratch")
    assert "transformers" in reference.name and "read again" in reference.name
    assert not (tmp_path / "scratch").exists()
    expected = torch.from_numpy(case.source.logits).log_softmax(-1).numpy()
    for ids, row in zip(input_ids().tolist(), expected, strict=True):
        np.testing.assert_allclose(reference.log_probs(ids[:3], ids[3:]), row[:-1], atol=1e-5)
