"""In which order rows join: clients' requests take turns by the tokens of their contexts.

This is start-time fair queueing with a clock that counts tokens. The first rows of a request are due when it arrives,
and each further one when the clock has gone on by the tokens of those before it. It goes on by the tokens that are run,
divided by the number of requests that wait. So the rows of a request that is alone are due as they are run, a small
request that comes later joins in the next pass, and none waits for ever: what arrives later is due later.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ..rows.sequence import AT_ONCE, Sequence


class Turns:
    """Says when rows are due.

    Args:
        first_tokens: of each request are due at once, so that the rows of a small one stay together.
    """

    def __init__(self, first_tokens: int) -> None:
        self._first_tokens, self._now = first_tokens, 0.0
        self._ends: dict[Hashable, float] = {}  # of clients' requests: when their next row is due, if that is later

    def assign(self, sequences: Iterable[Sequence]) -> None:
        """Set when rows are due that have just arrived, in this order."""
        self._ends = {client: end for client, end in self._ends.items() if end > self._now}
        for sequence in sequences:
            client = sequence.job.client
            begin = max(self._now, self._ends.get(client, AT_ONCE))
            sequence.set_due(max(self._now, begin - self._first_tokens))
            self._ends[client] = begin + _tokens(sequence)

    def advance(self, joining: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Go on by the rows that join the batch, while others wait."""
        clients = {sequence.job.client for sequence in (*joining, *waiting)}
        self._now += sum(map(_tokens, joining)) / max(1, len(clients))


def _tokens(sequence: Sequence) -> int:
    return max(len(sequence.context.ids), sequence.source_length)
