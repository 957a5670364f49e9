"""Which part of a network a process holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """Which part of the network a process holds.

    Attributes:
        layers: indices; of the decoder where there is an encoder too.
        rank: whose shard of each split tensor; None: all shards, joined.
        embeds: whether it has the embeddings.
        predicts: whether it has the head, or the tensor rank's part of its rows.
        encoder_layers: of the encoder; None: all.
    """

    layers: range
    rank: int | None = None
    embeds: bool = True
    predicts: bool = True
    encoder_layers: range | None = None


def vocabulary_part(vocab_size: int, rank: int, ranks: int) -> range:
    """Return the tokens that a tensor rank predicts; the ranks' numbers of tokens differ by one at most."""
    return range(vocab_size * rank // ranks, vocab_size * (rank + 1) // ranks)
