"""Requests that use all that a row may ask for, one after the other on a scheduler, to be answered twice."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from backends.fastertransformer.engine.rows.answer import Failure
from support.engines.asking import Tensors, ask, padded, word_list
from support.engines.few_pages import Served
from support.tiny_models.llama_models import VOCAB


def loads(seed: int) -> list[Tensors]:
    """Requests of one to three rows that use, each in another way, all that a row may ask for."""
    rng, found = random.Random(seed), list[Tensors]()
    shared = [rng.randrange(3, VOCAB) for _ in range(40)]
    drawn = {"runtime_top_k": 5, "temperature": 0.7}
    ways: list[dict[str, Any]] = [
        {},
        {"is_return_log_probs": True, "is_return_raw_log_probs": True, "num_top_log_probs": 3},
        {**drawn, "repetition_penalty": 1.2, "is_return_log_probs": True},
        {"runtime_top_p": 0.8, "frequency_penalty": 0.4, "output_presence_penalty": 0.3},
        {**drawn, "min_length": 9},
        {"runtime_top_p": 1.0, "min_p": 0.01, "presence_penalty": 0.2},
        {"bad_words_list": word_list([[17], [9, 21]]), "stop_words_list": word_list([[33], [8, 2]])},
        {"beam_width": 3, "is_return_log_probs": True},
        {"runtime_top_p": 0.9, "top_p_decay": 0.9, "top_p_min": 0.1},
    ]
    for place in range(18):
        more, rows = ways[place % len(ways)], 1 if place % len(ways) == 6 else rng.randrange(1, 4)
        lines = [
            shared * (place % 3 == 0) + [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 5, 31, 32, 60]))]
            for _ in range(rows)
        ]
        seeds, counts = [rng.randrange(1 << 40) for _ in lines], [rng.choice([1, 2, 30, 75]) for _ in lines]
        found.append(ask(lines, counts, end_id=rng.randrange(VOCAB), random_seed=seeds, **more))
        if "min_length" in more:
            found[-1]["stop_token_ids"] = padded([[5, 40, 41]] * rows)
    return found


def run(served: Served, requests: list[Tensors], seed: int) -> list[list[Tensors]]:
    """Send requests one by one, while those before them decode; returns the answers of each."""
    rng, answers = random.Random(seed), []
    for request in requests:
        answers.append(served.submit(request))
        for _ in range(rng.randrange(3)):
            served.scheduler.step()
    served.run()
    for each in answers:
        assert not isinstance(each[-1], Failure), each[-1]
    return [[dict(answer.tensors) for answer in each] for each in answers]


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-4 if values.dtype.kind == "f" else 0, err_msg=name)
