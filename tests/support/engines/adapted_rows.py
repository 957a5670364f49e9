"""Rows with adapters: what an engine answers, against transformers' model with each one's merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from backends.fastertransformer.engine.request.adapters import Adapters
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from support.engines.asking import ask, generated
from support.tiny_models.greedy import NEVER
from support.tiny_models.llama_models import VOCAB


def lines(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCAB, int(n)).tolist() for n in generator.integers(2, longest, count)]


def check_rows(
    engine: Any,
    models: dict[str, Any],
    names: list[str],
    count: int = 8,
    limit: float = 1e-4,
    longest: int = 30,
    **told: Any,
) -> None:
    """Compare rows of one request, each with its adapter: tokens, and log-probabilities of prompts and answers."""
    rows = lines(len(names), longest)
    settings = {"end_id": NEVER, "is_return_log_probs": True, "is_return_context_log_probs": True, **told}
    settings |= {"runtime_top_p": 1e-7}  # greedy, with the model's own probabilities
    given = ask(rows, count, lora_name=np.array(names, object), **settings)
    (outputs,) = engine.generate([engine.parse(given)])
    for row, (line, name) in enumerate(zip(rows, names, strict=True)):
        found = generated(outputs, row)
        whole = torch.tensor([*line, *found])
        with torch.no_grad():
            logits = models[name](whole[None]).logits[0, :-1]
        assert found == logits[len(line) - 1 :].argmax(-1).tolist()
        known = logits.log_softmax(-1).gather(1, whole[1:, None])[:, 0].numpy()
        differences = np.abs(outputs["context_log_probs"][row, 1 : len(line)] - known[: len(line) - 1])
        assert differences.max(initial=0) < limit
        assert np.abs(outputs["output_log_probs"][row, 0] - known[len(line) - 1 :]).max() < limit


def answered(adapters: Adapters, steps: Any, scheduler: Scheduler, name: str, line: list[int], **told: Any) -> Any:
    """Submit a request of an adapter; returns its answers, as they come."""
    answers = list[Answer]()
    tensors = ask([line], told.pop("count", 12), end_id=NEVER, lora_name=np.array([name], object), **told)
    scheduler.add(Job(parse_request(tensors, steps.config, None, adapters), answers.append))
    return answers
