"""Logits: the final norm and the head, whose columns tensor parallel processes share."""

from __future__ import annotations

from torch import Tensor

from ..arrays import Array, upload
from ..model.network import Network
from ..ops import scoring
from ..ops.logits import argmax
from .collective import Collective, collective_step
from .graphs import Chosen


class Predictions(Collective):
    """Predicts from hidden states of rank 0, in all processes that have a part of the head.

    Args:
        network: all of it, or this process's part.
        places: of adapters on the device.

    Attributes:
        decoded: this process's logits of the last decode.
    """

    def __init__(self, network: Network, places: int = 0) -> None:
        self._places = places
        self.network, self.config, self.device = network, network.config, network.weights.like.device
        self._given: Tensor | None = None  # rank 0's hidden states, for predict
        self.decoded: Tensor | None = None

    def argmax(self, hidden: Tensor, adapters: Array | None = None) -> Chosen:
        """Return the logits and the argmax tokens that follow hidden states, [N, hidden].

        Args:
            hidden: of N tokens.
            adapters: int64 [N], the place of each one's adapter, or the number of places; None: none has any.
        """
        logits = self.logits(hidden, adapters)
        return logits, argmax(logits)

    def logits(self, hidden: Tensor, adapters: Array | None = None) -> Tensor:
        """Final norm and head: [N, hidden] -> fp32 [N, V]; see argmax."""
        if not self.network.comm.is_split:
            return self._logits(hidden, adapters)
        self._given = hidden
        return self.predict(len(hidden), adapters)

    def _logits(self, hidden: Tensor, adapters: Array | None) -> Tensor:
        """Compute this process's part of logits."""
        if adapters is None:
            return self.network.logits(hidden)
        rows = self.network.ops.adapted_rows(upload(adapters, self.device), self._places, adapters)
        return self.network.logits(hidden, None, rows)

    @collective_step
    def predict(self, count: int, adapters: Array | None = None) -> Tensor:
        """Compute the logits of ``count`` hidden states of rank 0 in all processes that have a part of the head."""
        given = self._broadcast_given(count)
        if not self.network.weights.head:
            return self.network.weights.like
        return self.network.comm.gather_logits(self._logits(given, adapters))

    def score(self, hidden: Tensor, tokens: Array, most: int, adapters: Array | None = None) -> Tensor:
        """Score the token after each hidden state, and the ``most`` largest: [N, hidden], [N] -> see score_rows.

        Of adapters, see argmax.
        """
        if not self.network.comm.is_split:
            return scoring.score_rows(self._logits(hidden, adapters), upload(tokens, self.device), most)
        self._given = hidden
        return scoring.merge_parts(self.summarize(tokens, most, adapters), most)

    @collective_step
    def summarize(self, tokens: Array, most: int, adapters: Array | None = None) -> list[Tensor]:
        """Summarize the logits of hidden states of rank 0 in all processes that have a part of the head."""
        given = self._broadcast_given(len(tokens))
        if not self.network.weights.head:
            return []
        return self.network.comm.gather_summaries(self._logits(given, adapters), upload(tokens, self.device), most)

    def _broadcast_given(self, count: int) -> Tensor:
        given, self._given = self._given, None
        if given is None:
            given = self.network.weights.like.new_empty(count, self.config.hidden_units)
        return self.network.comm.broadcast(given.contiguous())

    def full_logits(self, chosen: Chosen) -> Tensor:
        """Return the logits of all tokens, fp32 [N, V], of what argmax or the last decode returned."""
        logits = chosen[0]
        return logits if logits.shape[1] == self.config.vocab_size else self.gather_logits()

    @collective_step
    def gather_logits(self) -> Tensor:
        """Gather the processes' parts of the last decode step's logits, [N, V], in rank 0."""
        if not self.network.weights.head or self.decoded is None:
            return self.network.weights.like
        return self.network.comm.gather_logits(self.decoded)
