"""Seconds of what ``benchmarks/under_load.py`` does for minutes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.served import Deployment

from benchmarks.under_load import UnderLoadArguments, run, write_models
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

DATA = Path(__file__).resolve().parents[1] / "data"


def test_no_answer_is_wrong_under_load(tmp_path: Path) -> None:
    convert(ConvertArguments(DATA / "nemo" / "gpt122_tp1_pp1.nemo", tmp_path / "1-gpu", 1, "fp32"))
    write_models(tmp_path / "1-gpu", tmp_path / "repo", max_batch_size=16)
    deployment = Deployment(tmp_path / "repo", tmp_path / "run")
    endpoint = deployment.wait_until_published()
    arguments = UnderLoadArguments(str(deployment.endpoint_file), clients=20, duration_s=5, max_batch_size=16)
    outcome = asyncio.run(run(endpoint, arguments))
    assert not outcome.problems
    assert set(outcome.counts) == {"whole", "streamed", "given up", "hung up", "refused"}
    assert outcome.tokens > 100
    assert deployment.stop() == 0, deployment.text
