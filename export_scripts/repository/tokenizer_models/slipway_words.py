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
    """Encode one CSV line of words a request row as FasterTransformer's bad or stop words.

    The layout is that of ``to_word_list_format`` in FasterTransformer backend's GPT repository: first
    the ids of all words, one after another, padded with 0; then the end offset of each word, padded
    with -1. A row without words is [[0], [-1]]. A space after a comma belongs to the word.

    Args:
        tokenizer: of the model.
        rows: a CSV line each.
        always: tokens that are words of every row.

    Returns:
        [batch, 2, ids of the longest row, at least 1].
    """
    words = [(_encode_words(tokenizer, row) if row else []) + [[token] for token in always] for row in rows]
    length = max([1, *(sum(map(len, row)) for row in words)])
    result = np.zeros((len(words), 2, length), dtype=np.int32)
    result[:, 1] = -1
    if not any(words):  # the rule
        return result
    for index, row in enumerate(words):
        flat = [token for ids in row for token in ids]
        result[index, 0, : len(flat)] = flat
        result[index, 1, : len(row)] = np.cumsum([len(ids) for ids in row])
    return result


def _encode_words(tokenizer: Encoder, row: str) -> list[list[int]]:
    return [ids for line in csv.reader(io.StringIO(row)) for word in line if (ids := tokenizer.encode(word))]
