"""Seconds of what ``benchmarks/serving/under_load.py`` does for minutes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.servers.served import Deployment
from support.shards.llama_shards import shards_of

from benchmarks.serving.under_load import UnderLoadArguments, run, write_models
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from ft_format.families import gpt, llama

DATA = Path(__file__).resolve().parents[1] / "data"


def shards_of_family(family: str, folder: Path) -> tuple[Path, int, int]:
    """Convert a model: its shards, its positions and how many tokens it knows."""
    if family == "llama":
        root, model = shards_of("llama", folder, 1)
        return root, model.config.max_position_embeddings, model.config.vocab_size
    convert(ConvertArguments(DATA / "nemo" / "gpt122_tp1_pp1.nemo", folder / "1-gpu", 1, "fp32"))
    return folder / "1-gpu", 32, 1000


@pytest.mark.clock  # of every kind there must be one within the seconds
@pytest.mark.parametrize("family", [pytest.param("gpt", marks=pytest.mark.long), "llama"])
def test_no_answer_is_wrong_under_load(family: str, tmp_path: Path) -> None:
    shards, longest, vocab_size = shards_of_family(family, tmp_path)
    write_models(shards, tmp_path / "repo", max_batch_size=16, family=llama.FAMILY if family == "llama" else gpt.FAMILY)
    deployment = Deployment(tmp_path / "repo", tmp_path / "run")
    endpoint = deployment.wait_until_published()
    arguments = UnderLoadArguments(
        str(deployment.endpoint_file),
        clients=20,
        duration_s=3,
        longest=longest,
        vocab_size=vocab_size,
        max_batch_size=16,
    )
    outcome = asyncio.run(run(endpoint, arguments))
    assert not outcome.problems
    assert set(outcome.counts) == {"whole", "streamed", "given up", "hung up", "refused"}
    assert outcome.tokens > 100
    assert deployment.stop() == 0, deployment.text
