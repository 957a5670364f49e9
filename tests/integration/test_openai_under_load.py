"""Seconds of what ``benchmarks/openai_under_load.py`` does for minutes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.served import Deployment

from benchmarks.made_up_repository import write_repository
from benchmarks.openai_under_load import OpenAIUnderLoadArguments, run


def test_no_answer_of_the_openai_endpoint_is_wrong_under_load(tmp_path: Path) -> None:
    repository = write_repository(tmp_path, (2, 64, 2), "fp32", 1 << 26)
    deployment = Deployment(repository, tmp_path / "run", openai_port=0)
    endpoint = deployment.wait_until_published()
    arguments = OpenAIUnderLoadArguments(str(deployment.endpoint_file), clients=50, duration_s=15)
    outcome = asyncio.run(run(endpoint, arguments))
    assert not outcome.problems
    kinds = {"whole", "streamed", "left", "cut", "read slowly", "sent slowly", "refused"}
    assert set(outcome.counts) == kinds and outcome.tokens > 1000
    assert outcome.endpoint_mb[-1] < outcome.endpoint_mb[len(outcome.endpoint_mb) // 3] + 20
    assert deployment.stop() == 0, deployment.text
    assert "Traceback" not in (tmp_path / "run" / "openai.log").read_text()
