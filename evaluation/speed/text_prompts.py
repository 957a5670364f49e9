"""Prompts as text, for a load on an ensemble: random words that are one token each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from evaluation.client.tokenizer import Tokenizer
from evaluation.speed.workload import Prompt, Workload
from handover.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

_FEWEST_WORDS = 16


class Words:
    """Words that a tokenizer keeps whole, so that a text of n of them has n tokens.

    Args:
        tokenizer: of the served model.
        vocab_size: ids to look among.

    Raises:
        ConfigError: the vocabulary has next to none.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        spelt = {word: number for number in range(vocab_size) if (word := tokenizer.decode([number]).strip()).isalpha()}
        # Behind another word it must still be that one token; "a" is a word that every tokenizer has.
        before = tokenizer.encode("a")
        self._words = [word for word, number in spelt.items() if tokenizer.encode(f"a {word}") == [*before, number]]
        if len(self._words) < _FEWEST_WORDS:
            raise ConfigError(
                "the served model's vocabulary has no words to make prompts of",
                "give texts: benchmark.load.prompt_file",
            )

    def prompts(self, workload: Workload, random: np.random.Generator) -> Iterator[Prompt]:
        """Draw prompts, for ever; a prompt counts the tokens that its text really has."""
        while True:
            wanted = workload.input.draw(random)
            drawn = [self._words[i] for i in random.integers(0, len(self._words), wanted)]
            text = " ".join(drawn)
            # The first word has no space before it and may be more than one token.
            while len(drawn) > 1 and len(self._tokenizer.encode(text)) > wanted:
                text = " ".join(drawn := drawn[:-1])
            yield Prompt(tuple(self._tokenizer.encode(text)), workload.output.draw(random), text)
