"""Tokens and log-probabilities of an engine over a Hugging Face directory, against transformers' model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.model.families import hub
from backends.fastertransformer.engine.settings import Settings
from models.described import Described, read_directory
from support.engines.asking import CPU, ask, generated
from support.tiny_models.greedy import NEVER


def opened(directory: Path, ranks: int = 1, stages: int = 1, **settings: Any) -> Any:
    """Open the engine in fp32, each rank in a process of its own."""
    given = {"kv_cache_bytes": 1 << 22, "has_process_per_rank": ranks * stages > 1, **settings}
    return open_engine(Settings(directory, ranks, stages, "fp32", 1, "Llama", **given), CPU)


def described(directory: Path, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the engine take a directory's model for a changed one, which no architecture can say."""
    read = read_directory

    def changed(*given: Any) -> Described:
        found = read(*given)
        return found._replace(decoder=change(found.decoder))

    monkeypatch.setattr(hub, "read_directory", changed)


def check_served(
    engine: Any, model: Any, logits_of: Callable[[Tensor], Tensor] | None = None, longest: int = 20
) -> None:
    """Compare rows that decode together: tokens, and log-probabilities of prompts and answers.

    Args:
        engine: is asked.
        model: of transformers.
        logits_of: gives its logits, [1, T, V]; None: the model does.
        longest: tokens of the longest prompt.
    """
    compute = logits_of or (lambda ids: model(ids).logits)
    vocab = model.config.vocab_size
    lines = [np.random.default_rng(seed).integers(3, vocab, n).tolist() for seed, n in enumerate((longest, 1, 9))]
    told = {"end_id": NEVER, "runtime_top_p": 1e-7, "is_return_log_probs": True, "is_return_context_log_probs": True}
    (outputs,) = engine.generate([engine.parse(ask(lines, 8, **told))])
    for row, line in enumerate(lines):
        found = generated(outputs, row)
        whole = torch.tensor([*line, *found])
        with torch.no_grad():
            logits = compute(whole[None])[0, :-1]
        assert len(found) == 8 and found == logits[len(line) - 1 :].argmax(-1).tolist()
        known = logits.log_softmax(-1).gather(1, whole[1:, None])[:, 0].numpy()
        assert np.abs(outputs["context_log_probs"][row, 1 : len(line)] - known[: len(line) - 1]).max(initial=0) < 1e-4
        assert np.abs(outputs["output_log_probs"][row, 0] - known[len(line) - 1 :]).max() < 1e-4
