"""Draws of three tokens behind one prompt, against the distribution that transformers gives (chi-square)."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch

from support.engines.asking import ask, generated
from support.engines.few_pages import Served
from support.tiny_models.greedy import NEVER

_TOP_K, _TEMPERATURE = 3, 0.8
Triples = dict[tuple[int, int, int], float]


def expected_triples(model: Any, line: list[int]) -> Triples:
    """Return the three tokens that may follow a line, and their probabilities."""
    with torch.no_grad():
        first = _nearest(model, [line])[0]
        seconds = _nearest(model, [[*line, token] for token in first])
        thirds = _nearest(model, [[*line, a, b] for a in first for b in seconds[list(first).index(a)]])
    found = Triples()
    for at, (a, p) in enumerate(first.items()):
        for place, (b, q) in enumerate(seconds[at].items()):
            found |= {(a, b, c): p * q * r for c, r in thirds[at * _TOP_K + place].items()}
    return found


def check_draws(served: Served, line: list[int], expected: Triples, rows: int) -> None:
    """Draw behind a line in many rows, some of whose drafts are right and some are not."""
    counts, rng = Counter[tuple[int, ...]](), random.Random(7)
    drawn = {"runtime_top_k": _TOP_K, "temperature": _TEMPERATURE, "end_id": NEVER}
    for _ in range(0, rows, 30):
        answers = served.submit(ask([line] * 30, 3, random_seed=[rng.getrandbits(60) for _ in range(30)], **drawn))
        served.run()
        counts.update(tuple(generated(answers[-1].tensors, row)) for row in range(30))
    metrics = served.scheduler.metrics
    assert 0 < metrics.accepted_tokens < metrics.draft_tokens
    assert counts.keys() <= expected.keys()
    square = sum((counts[key] - rows * p) ** 2 / (rows * p) for key, p in expected.items())
    freedom = torch.tensor((len(expected) - 1) / 2)
    assert torch.special.gammaincc(freedom, torch.tensor(square / 2)) > 0.01


def _nearest(model: Any, lines: list[list[int]]) -> list[dict[int, float]]:
    """The tokens that top-k keeps behind each line, and their probabilities."""
    values, ids = (model(input_ids=torch.tensor(lines)).logits[:, -1] / _TEMPERATURE).topk(_TOP_K)
    found = zip(ids.tolist(), values.softmax(-1).tolist(), strict=True)
    return [dict(zip(*each, strict=True)) for each in found]
