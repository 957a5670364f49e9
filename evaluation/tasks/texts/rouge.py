"""ROUGE, as the package rouge-score defines it without stemming (Lin, "ROUGE", 2004): F-measures from 0 to 1.

A text is lower-cased, and its words are its runs of ASCII letters and digits. *rouge1* and *rouge2* count common words
and pairs of words, *rougeL* the longest common subsequence, *rougeLsum* the same by sentence, one a line: each
sentence of the reference is covered by the union of its common subsequences with all sentences of the prediction.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_WORD = re.compile("[a-z0-9]+")


def rouge_n(prediction: str, reference: str, length: int) -> float:
    """Return the F-measure over runs of ``length`` words."""
    given, gold = (_runs(words(text), length) for text in (prediction, reference))
    return _f_measure(sum((given & gold).values()), sum(given.values()), sum(gold.values()))


def rouge_l(prediction: str, reference: str) -> float:
    """Return the F-measure of the longest common subsequence of words."""
    given, gold = words(prediction), words(reference)
    return _f_measure(len(_common_places(gold, given)), len(given), len(gold))


def rouge_lsum(prediction: str, reference: str) -> float:
    """Return the F-measure of the common subsequences of sentences, one sentence a line."""
    given, gold = ([words(line) for line in text.split("\n") if line] for text in (prediction, reference))
    left_given, left_gold = Counter(sum(given, [])), Counter(sum(gold, []))
    hits = 0
    for sentence in gold:
        for place in sorted(set().union(*(_common_places(sentence, other) for other in given))):
            word = sentence[place]
            if left_given[word] and left_gold[word]:  # each word counts once on either side
                hits += 1
                left_given[word] -= 1
                left_gold[word] -= 1
    return _f_measure(hits, sum(map(len, given)), sum(map(len, gold)))


def words(text: str) -> list[str]:
    """Split a text into words."""
    return _WORD.findall(text.lower())


def _runs(of: Sequence[str], length: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(of[start : start + length]) for start in range(len(of) - length + 1))


def _f_measure(hits: int, given: int, gold: int) -> float:
    """Harmonic mean of precision and recall: 2 hits / (given + gold)."""
    return 2 * hits / (given + gold) if hits else 0.0


def _common_places(first: Sequence[str], second: Sequence[str]) -> list[int]:
    """Return the indices in ``first`` of a longest common subsequence; of several, of the one that ends last."""
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, word in enumerate(first):
        for j, other in enumerate(second):
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if word == other else max(lengths[i + 1][j], lengths[i][j + 1])
    places, i, j = [], len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            places.append(i)
        elif lengths[i][j - 1] > lengths[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return places[::-1]
