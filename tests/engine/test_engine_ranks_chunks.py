"""Prompts that are run in chunks, over several processes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support.engines.asking import CPU, ask, prompts
from support.engines.rank_processes import RankProcesses, answer_of
from support.shards.llama_shards import shards_of

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.settings import Settings

NEVER = 4000  # an end_id outside the vocabulary
PREFILL = re.compile(r"prefill of \[(\d+)\] tokens from \[(\d+)\]")


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("chunk_tokens", [8, 0])
def test_a_prompt_in_chunks_over_ranks_gives_what_one_process_gives(
    tensor: int, pipeline: int, chunk_tokens: int, tmp_path: Path
) -> None:
    shards, _ = shards_of("llama", tmp_path, tensor)
    wanted = {"end_id": NEVER, "is_return_log_probs": True, "is_return_context_log_probs": True}
    lines = [[token % 90 for token in prompt] for prompt in prompts(5, 41)]
    requests = [ask([line], count, **wanted) for line, count in zip(lines, (50, 12), strict=True)]
    how = {"chunk_tokens": chunk_tokens, "is_together": True}
    ranks = RankProcesses(shards, tmp_path, tensor, pipeline, requests, model_type="Llama", **how)
    try:
        settings = Settings(shards, tensor, 1, "fp32", 1, "Llama", has_process_per_rank=False)
        alone = open_engine(settings, CPU)
        expected = [answer_of(alone, each) for each in requests]
        assert set(ranks.wait(240)) == {0}, ranks.text
    finally:
        ranks.stop()
    passes = [(int(tokens), int(start)) for tokens, start in PREFILL.findall(ranks.text)]
    # Chunks shrink with the cells before them, to a half at least; the last has what is left.
    chunks = [(8, 0), (8, 8), (8, 16), (4, 24), (4, 28), (4, 32), (4, 36), (1, 40)]
    assert passes == [(5, 0), *(chunks if chunk_tokens else [(41, 0)])]
    for ours, theirs in zip(ranks.answers, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            np.testing.assert_allclose(ours[name], values, atol=1e-4 if values.dtype.kind == "f" else 0, err_msg=name)
