"""Bad and stop words in the layout that FasterTransformer's models take."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Encoder(Protocol):
    """What words need of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without any added token."""


def encode_word_lists(tokenizer: Encoder, rows: Sequence[str], always: Sequence[int] = ()) -> NDArray[np.int32]:
    """Encode one CSV line of words a request row; see ``lay_out_words``. A space after a comma belongs to the word."""
    return lay_out_words(
        [(_encode_words(tokenizer, row) if row else []) + [[token] for token in always] for row in rows]
    )


def lay_out_words(rows: Sequence[Sequence[Sequence[int]]]) -> NDArray[np.int32]:
    """Lay words out as ``to_word_list_format`` in FasterTransformer backend's GPT repository does.

    First the ids of all words, one after another, padded with 0; then the end of each word, padded with -1. A row
    without words is [[0], [-1]].

    Args:
        rows: words of each row as token ids; empty words are left out.

    Returns:
        [batch, 2, ids of the longest row, at least 1].
    """
    flat = [[token for word in words for token in word] for words in rows]
    lists = np.zeros((len(rows), 2, max([1, *map(len, flat)])), np.int32)
    lists[:, 1] = -1
    for row, words in enumerate(rows):
        ends = np.cumsum([len(word) for word in words if word], dtype=np.int32)
        lists[row, 0, : len(flat[row])], lists[row, 1, : len(ends)] = flat[row], ends
    return lists


def _encode_words(tokenizer: Encoder, row: str) -> list[list[int]]:
    return [ids for line in csv.reader(io.StringIO(row)) for word in line if (ids := tokenizer.encode(word))]
