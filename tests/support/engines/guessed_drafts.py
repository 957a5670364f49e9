"""Drafts that are mostly right: what a row has said without drafts, with some tokens replaced."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from backends.fastertransformer.engine.rows.prompt_lookup import PromptLookup


def guess(
    monkeypatch: pytest.MonkeyPatch, texts: Mapping[tuple[int, ...], Sequence[int]], wrong: float, vocab_size: int
) -> None:
    """Draft what follows in the text of a row's prompt; each token is another one with a probability."""
    rng = random.Random(1)
    prompts: dict[int, tuple[int, ...]] = {}

    def draft(lookup: PromptLookup, most: int) -> list[int]:
        prompt = prompts.setdefault(id(lookup), tuple(lookup.tokens[: lookup.begin]))
        known = len(lookup.tokens) - len(prompt)
        follows = texts[prompt][known : known + most]
        return [rng.randrange(vocab_size) if rng.random() < wrong else token for token in follows]

    monkeypatch.setattr(PromptLookup, "draft", draft)
