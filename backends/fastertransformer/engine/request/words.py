"""Bad and stop words: a list of token sequences for each row.

Layout: FasterTransformer's GPT guide: int32 [B, 2, n]; row 0 holds the concatenated tokens of all words, row 1 the end
of each word in row 0, padded with -1. Meaning: ``ban_bad_words.cu`` and ``stop_criteria_kernels.cu``: both compare with
input and output, so a word may begin in the prompt; its last token is always a generated one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from ..errors import RequestError
from .schema import Inputs, checked


class WordList:
    """The words of one row, as token ids; a word without tokens is complete after every token."""

    def __init__(self, words: Iterable[Sequence[int]] = ()) -> None:
        self._last_tokens: dict[tuple[int, ...], set[int]] = defaultdict(set)  # by the tokens before it in the word
        self._has_empty_word = False
        for word in words:
            if word:
                self._last_tokens[tuple(word[:-1])].add(word[-1])
            self._has_empty_word |= not word
        self.reach = max(map(len, self._last_tokens), default=0)  # earlier tokens that completions compares

    def __bool__(self) -> bool:
        return bool(self._last_tokens) or self._has_empty_word

    def is_completed_by(self, token: int, sequence: Sequence[int]) -> bool:
        """Return whether a token completes a word when it is appended to a sequence; see completions."""
        return self._has_empty_word or token in self.completions(sequence)

    def completions(self, sequence: Sequence[int]) -> set[int]:
        """Return the tokens that complete a word when appended to input and output, or to their last ``reach``."""
        found: set[int] = set()
        for beginning, last in self._last_tokens.items():
            if len(beginning) <= len(sequence) and tuple(sequence[len(sequence) - len(beginning) :]) == beginning:
                found |= last
        return found


def parse_word_lists(name: str, sent: Inputs) -> list[WordList]:
    """Read a word list tensor, [B, 2, n]; without the tensor there are no words.

    A token outside the vocabulary is legal and never generated. An empty list is [[0], [-1]]. A word without tokens, as
    in [[0], [0]], means what it means in FasterTransformer's kernels: nothing as a bad word, but a stop word that is
    complete after the row's first token (the published sample_request_single.json has such a list).
    """
    if name not in sent.tensors:
        return [WordList()] * sent.batch
    lists, array = [], checked(name, sent.tensors[name], (np.int32,), sent.batch, 2, "n")
    for row, (ids, ends) in enumerate(array.tolist()):
        cuts = [0, *ends[: sum(end >= 0 for end in ends)]]
        if cuts != sorted(cuts) or cuts[-1] > len(ids):
            raise RequestError(
                f"{name} has ends {ends} in row {row}, shape {list(array.shape)}; expected [{sent.batch}, 2, n]: token "
                "ids, then the end of each word in ascending order, filled up with -1"
            )
        if (least := min(ids[: cuts[-1]], default=0)) < 0:
            raise RequestError(f"{name} holds {least} in row {row}; token ids are 0 or more")
        words = [ids[start:end] for start, end in pairwise(cuts)]
        lists.append(WordList(word for word in words if word or name == "stop_words_list"))
    return lists
