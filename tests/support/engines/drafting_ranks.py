"""Engines of several processes in which one process drafts for all, with drafts that are always right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from support.engines.asking import ask, generated
from support.engines.rank_processes import RankProcesses
from support.tiny_models.greedy import NEVER, argmaxes


def check_drafting_ranks(root: Path, directory: Path, model: Any, speculation: str, tensor: int, pipeline: int) -> None:
    """Ask processes that share a model, and compare with transformers; every drafted token must have been taken."""
    lines = [[random.Random(seed).randrange(3, 90) for _ in range(40)] for seed in range(3)]
    requests = [ask([line], 50, end_id=NEVER) for line in lines]
    ranks = RankProcesses(root, directory, tensor, pipeline, requests, model_type="Llama", speculation=speculation)
    try:
        assert set(ranks.wait(240)) == {0}, ranks.text
    finally:
        ranks.stop()
    for line, answer in zip(lines, ranks.answers, strict=True):
        tokens = generated(answer)
        assert tokens == argmaxes(model, line, tokens)
    accepted = next(line for line in ranks.text.splitlines() if line.endswith("tokens accepted")).split()
    assert int(accepted[0]) == int(accepted[2]) > 0
