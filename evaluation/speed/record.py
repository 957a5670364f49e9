"""What is kept of each request: monotonic integer nanoseconds and token counts, nothing derived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestRecord:
    """One request that ended.

    Attributes:
        scheduled_ns: when it was due; in the closed loop, when its slot became free.
        sent_ns: when its bytes were handed to gRPC.
        done_ns: when its last token, or its failure, arrived.
        input_tokens: of the prompt.
        chunk_ns: arrival of each answer that brought tokens; one where nothing is streamed.
        chunk_tokens: tokens that each of them brought.
        is_streamed: whether the server could answer token by token.
        error: why it failed; empty if it succeeded.
    """

    scheduled_ns: int
    sent_ns: int
    done_ns: int
    input_tokens: int
    chunk_ns: tuple[int, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    is_streamed: bool = False
    error: str = ""

    @property
    def output_tokens(self) -> int:
        """Tokens that were generated."""
        return sum(self.chunk_tokens)


@dataclass(frozen=True)
class Window:
    """Consecutive answers: one repeat of a measurement, or several joined.

    Attributes:
        records: in the order in which they ended.
        started_ns: when the last answer before them arrived, or when the first of them was sent.
        ended_ns: when the last of them arrived.
    """

    records: tuple[RequestRecord, ...]
    started_ns: int
    ended_ns: int

    @property
    def succeeded(self) -> tuple[RequestRecord, ...]:
        """Requests with an answer."""
        return tuple(record for record in self.records if not record.error)

    @property
    def duration_ns(self) -> int:
        """Wall time of the window."""
        return self.ended_ns - self.started_ns


def join(windows: Sequence[Window]) -> Window:
    """Join windows into one that lasts as long as they do together; pauses between them do not count."""
    records = tuple(record for window in windows for record in window.records)
    started_ns = windows[0].started_ns if windows else 0
    return Window(records, started_ns, started_ns + sum(window.duration_ns for window in windows))
