"""What random prompts are made of: token ids, or words that are one token each.

A server whose tokenizer is not at hand and which takes no token ids gets common words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evaluation.speed.prompts.workload import LoadPrompt
from handover.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from evaluation.client.tokenizer import Tokenizer

_FEWEST_WORDS = 16


@dataclass(frozen=True)
class RandomIds:
    """Token ids of a vocabulary, all equally probable."""

    vocab_size: int

    def draw(self, number: int, random: np.random.Generator) -> list[int]:
        """Draw token ids."""
        ids: list[int] = random.integers(0, self.vocab_size, number).tolist()
        return ids

    def prompt(self, tokens: Sequence[int], output_length: int) -> LoadPrompt:
        """Make a prompt of ids."""
        return LoadPrompt(tuple(tokens), output_length)


class Words:
    """Words that are one token each, so that a text of n words has n tokens.

    Raises:
        ConfigError: the vocabulary has fewer than 16 such words.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        spelt = {word: number for number in range(vocab_size) if (word := tokenizer.decode([number]).strip()).isalpha()}
        # A word must be one token after another word as well; every tokenizer has the word "a".
        before = tokenizer.encode("a")
        self._words = [word for word, number in spelt.items() if tokenizer.encode(f"a {word}") == [*before, number]]
        if len(self._words) < _FEWEST_WORDS:
            raise ConfigError(
                "the served model's vocabulary has no words to make prompts of",
                "give texts: benchmark.load.prompt_file",
            )

    def draw(self, number: int, random: np.random.Generator) -> list[int]:
        """Draw words by their numbers."""
        numbers: list[int] = random.integers(0, len(self._words), number).tolist()
        return numbers

    def prompt(self, tokens: Sequence[int], output_length: int) -> LoadPrompt:
        """Make a text of drawn words; the ids of the prompt are those of its text."""
        drawn = [self._words[number] for number in tokens]
        text = " ".join(drawn)
        # The first word has no space before it and may be more than one token.
        while len(drawn) > 1 and len(self._tokenizer.encode(text)) > len(tokens):
            text = " ".join(drawn := drawn[:-1])
        return LoadPrompt(tuple(self._tokenizer.encode(text)), output_length, text)


_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use each which she do how their if will up other about out many then them these
some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part
"""
"""Common English words, which the vocabularies of most language models hold as one token each."""


class CommonWords:
    """Prompts of as many words as tokens are wanted; the server's ``usage`` says how many tokens they were."""

    def __init__(self) -> None:
        self._words = _WORDS.split()

    def draw(self, number: int, random: np.random.Generator) -> list[int]:
        """Draw words by their numbers."""
        numbers: list[int] = random.integers(0, len(self._words), number).tolist()
        return numbers

    def prompt(self, tokens: Sequence[int], output_length: int) -> LoadPrompt:
        """Make a text of drawn words; its token ids are not known."""
        return LoadPrompt((), output_length, " ".join(self._words[number] for number in tokens))
