"""Random passages that both models score: enough to average over, and long enough for every position.

Tokens are drawn uniformly from the vocabulary with a fixed seed. This needs no text in any language, and the log
probability of an improbable token depends more on the weights than that of a predictable one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from handover.progress import Progress

if TYPE_CHECKING:
    from evaluation.tasks.scoring import Scorer  # a server's client, which made passages do without

Tokens = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]

WIDTH = 64  # tokens of a passage that is averaged over
_LONG = 2  # passages that go through all positions
_UNBOUNDED = 256  # tokens of these where a model has no last position: past a T5's last bucket of distances
_SEED = 16


@dataclass(frozen=True)
class Passages:
    """Passages of one length.

    Attributes:
        tokens: [n, L], the scored tokens: from the second one on or, for an encoder-decoder, all.
        source: [n, S], the encoder's input; None without an encoder.
    """

    tokens: Tokens
    source: Tokens | None = None

    def rows(self, begin: int, end: int) -> Passages:
        """Return a range of the passages."""
        return Passages(self.tokens[begin:end], None if self.source is None else self.source[begin:end])

    def with_more(self, more: Passages) -> Passages:
        """Return these passages followed by others of the same length."""
        source = None
        if self.source is not None and more.source is not None:
            source = np.concatenate([self.source, more.source])
        return Passages(np.concatenate([self.tokens, more.tokens]), source)


@dataclass(frozen=True)
class Room:
    """The limits of a model's sequences.

    Attributes:
        vocab_size: ids below it are tokens.
        positions: maximum number of input and output tokens of one sequence; None without a limit.
        has_encoder: whether the model is an encoder-decoder.
    """

    vocab_size: int
    positions: int | None
    has_encoder: bool = False


def make_passages(room: Room, count: int, longest: int) -> tuple[Passages, Passages]:
    """Make passages to average over, and a few that visit every position up to a length."""
    rng, length = np.random.default_rng(_SEED), _length(room, longest)
    return _draw(rng, room, count, min(WIDTH, length)), _draw(rng, room, _LONG, length)


def make_more_passages(room: Room, first: int, count: int, longest: int) -> Passages:
    """Make ``count`` further passages to average over, which differ from the ``first`` ones and are as long."""
    return _draw(np.random.default_rng([_SEED, first]), room, count, min(WIDTH, _length(room, longest)))


def _length(room: Room, longest: int) -> int:
    return min(longest, room.positions or _UNBOUNDED)


def _draw(rng: np.random.Generator, room: Room, rows: int, width: int) -> Passages:
    tokens = rng.integers(0, room.vocab_size, (rows, width))
    return Passages(tokens, rng.integers(0, room.vocab_size, (rows, width)) if room.has_encoder else None)


def unvisited(room: Room, visited: Sequence[int]) -> str:
    """Describe the positions that no prompt and no passage reaches; empty if all are reached.

    No scored token depends on the token at a model's last position, so this position counts as visited.

    Args:
        room: limits of the model.
        visited: number of tokens of each prompt with its answer, and of each passage.
    """
    reached = max(visited, default=1) - 1
    if room.positions is None or reached >= room.positions - 1:
        return ""
    return f"positions {reached} to {room.positions - 2} of {room.positions} were not visited"


def ask_scores(scorer: Scorer, passages: Passages, rows: int) -> Scores:
    """Have the server score passages.

    Returns:
        [n, scored tokens], in nats.

    Raises:
        ConfigError: no served model scores tokens.
        ServerError: a request failed.
    """
    found: list[tuple[float, ...]] = []
    starts = [*range(0, len(passages.tokens), rows), len(passages.tokens)]
    with Progress("parity", len(passages.tokens), "passages") as progress:
        for begin, end in pairwise(starts):
            part = passages.rows(begin, end)
            given = [tuple(row) for row in part.tokens.tolist()]
            pairs = [(row[:1], row[1:]) for row in given]
            if part.source is not None:
                pairs = list(zip(map(tuple, part.source.tolist()), given, strict=True))
            found += [score.log_probs for score in scorer.score(pairs)]
            progress.advance(end - begin)
    return np.array(found, np.float64)
