"""Bad and stop words: lists of token sequences, a list for each row.

Layout: FasterTransformer's GPT guide: int32 [B, 2, n]; row 0 holds the tokens of all words one after another, row 1 the
end of each word among them, filled up with -1. Meaning: ``ban_bad_words.cu`` and ``stop_criteria_kernels.cu``: both
compare with input and output alike, so a word may begin in the prompt; its last token is always a generated one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import RequestError
from ..generation.sampling import MASKED


class WordList:
    """The words of one row.

    Args:
        words: token ids of each; a word without tokens is complete behind every token.
    """

    def __init__(self, words: Iterable[Sequence[int]] = ()) -> None:
        self._last_tokens: dict[tuple[int, ...], set[int]] = defaultdict(set)  # by what precedes them in the word
        self._has_empty_word = False
        for word in words:
            if word:
                self._last_tokens[tuple(word[:-1])].add(word[-1])
            else:
                self._has_empty_word = True
        self.reach = max(map(len, self._last_tokens), default=0)  # tokens that must be known to tell a completion

    def __bool__(self) -> bool:
        return bool(self._last_tokens) or self._has_empty_word

    def is_completed_by(self, token: int, sequence: Sequence[int]) -> bool:
        """Say whether a token, put behind a sequence, completes a word; see completions."""
        return self._has_empty_word or token in self.completions(sequence)

    def completions(self, sequence: Sequence[int]) -> set[int]:
        """Give the tokens that, put behind a sequence, complete a word.

        Args:
            sequence: input and output so far, or its last ``reach`` tokens.
        """
        found: set[int] = set()
        for beginning, last in self._last_tokens.items():
            if len(beginning) <= len(sequence) and tuple(sequence[len(sequence) - len(beginning) :]) == beginning:
                found |= last
        return found


def parse_word_lists(name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.int32]], batch: int) -> list[WordList]:
    """Read a word list tensor, [B, 2, n].

    A token outside the vocabulary is legal: it never comes. An empty list is [[0], [-1]]. A word without tokens, as in
    [[0], [0]], is what it is in FasterTransformer's kernels: nothing among bad words, but complete at once among stop
    words, so that the row ends behind its first token (the published sample_request_single.json has such a list).

    Raises:
        RequestError: the shape is another, or the ends do not ascend from 0 to at most n and then stay -1.
    """
    expected = f"expected [{batch}, 2, n]: token ids, then the end of each word in ascending order, filled up with -1"
    if array.ndim != 3 or array.shape[:2] != (batch, 2):
        raise RequestError(f"{name} has shape {list(array.shape)}, {expected}")
    lists = []
    for row, (ids, ends) in enumerate(array):
        count = int((ends >= 0).sum())
        starts = np.concatenate([[0], ends[:count]])
        lengths = np.diff(starts)
        if (ends[:count] < 0).any() or (lengths < 0).any() or starts[-1] > len(ids):
            raise RequestError(f"{name} has ends {ends.tolist()} in row {row}, shape {list(array.shape)}; {expected}")
        words = [ids[start : start + length].tolist() for start, length in zip(starts, lengths, strict=False)]
        lists.append(WordList(word for word in words if word or name == "stop_words_list"))
    return lists


def ban(logits: Tensor, banned: Sequence[Iterable[int]]) -> Tensor:
    """Mask tokens: logits [B, V], token ids by row -> [B, V].

    Done before temperature, penalty and log-probabilities, as FasterTransformer does. (It never bans token 0, which
    stands for nothing in its lists' padding; here token 0 can be banned like any other.) A row in which every token is
    banned is left alone: there would be nothing to choose from.
    """
    vocab = logits.shape[-1]
    pairs = [(row, token) for row, tokens in enumerate(banned) for token in tokens if 0 <= token < vocab]
    if not pairs:
        return logits
    rows, tokens = torch.tensor(pairs, device=logits.device).T
    masked = logits.index_put((rows, tokens), torch.tensor(MASKED, dtype=logits.dtype, device=logits.device))
    return torch.where(torch.isneginf(masked).all(dim=-1, keepdim=True), logits, masked)
