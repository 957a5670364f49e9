"""Seconds of what ``benchmarks/serving/openai_under_load.py`` does for minutes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.servers.served import Deployment

from benchmarks.serving.made_up_repository import write_repository
from benchmarks.serving.openai_under_load import OpenAIUnderLoadArguments, rise_mb, run


@pytest.mark.clock  # of every kind there must be one within the seconds
def test_no_answer_of_the_openai_endpoint_is_wrong_under_load(tmp_path: Path) -> None:
    repository = write_repository(tmp_path, (2, 64, 2), "fp32", 1 << 26)
    deployment = Deployment(repository, tmp_path / "run", openai_port=0, openai_processes=3)
    endpoint = deployment.wait_until_published()
    arguments = OpenAIUnderLoadArguments(str(deployment.endpoint_file), clients=50, duration_s=5)
    outcome = asyncio.run(run(endpoint, arguments))
    assert not outcome.problems
    kinds = {"whole", "streamed", "left", "cut", "read slowly", "sent slowly", "refused"}
    assert set(outcome.counts) == kinds and outcome.tokens > 1000
    assert outcome.endpoint_mb[-1] < outcome.endpoint_mb[len(outcome.endpoint_mb) // 3] + 20
    assert deployment.stop() == 0, deployment.text
    assert "Traceback" not in (tmp_path / "run" / "openai.log").read_text()


def test_memory_is_judged_late_in_a_run_whatever_one_sample_says() -> None:
    grown_early = [80 + 20 * min(1, second / 60) for second in range(240)]
    assert rise_mb(grown_early) == 0
    assert rise_mb([*grown_early[:-1], 500]) == 0
    assert rise_mb([80 + second / 10 for second in range(240)]) == 6
