"""Random texts for a server whose tokenizer is not at hand and which takes no token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evaluation.speed.prompts.workload import LoadPrompt

if TYPE_CHECKING:
    import numpy as np

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
