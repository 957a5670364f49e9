"""Prompts as text, counted by tokenizers that are not ours."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from support.tiny_models.learnt_gpt2 import LearntModel

from evaluation.client.tokenizer import load_tokenizer
from evaluation.speed.prompts.tokens import Words
from evaluation.speed.prompts.workload import DrawingContext, Workload, seeded
from handover.errors import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LearntModel:
    return LearntModel(tmp_path_factory.mktemp("learnt"))


def test_a_text_has_the_wanted_number_of_tokens_and_is_the_same_each_time(model: LearntModel) -> None:
    words = Words(load_tokenizer(model.directory), 400)

    def draw(lengths: str) -> list[tuple[str, int]]:
        drawn = itertools.islice(Workload.parse(lengths).prompts(DrawingContext(words, seeded(1))), 50)
        return [(prompt.text, len(prompt.ids)) for prompt in drawn]

    texts = draw("12/4")
    assert texts == draw("12/4")
    assert len(set(texts)) == 50
    for text, tokens in texts:
        assert tokens == len(model.encode(text))  # Hugging Face's count
        assert 11 <= tokens <= 12
    assert all(tokens <= 40 for _, tokens in draw("uniform:1:40/4"))


def test_a_vocabulary_without_words_is_refused(tmp_path: Path) -> None:
    class Bytes:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode("latin-1")

    with pytest.raises(ConfigError, match="no words"):
        Words(Bytes(), 256)  # type: ignore[arg-type]
