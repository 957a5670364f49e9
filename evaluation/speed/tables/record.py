"""The raw data of each request: monotonic integer nanoseconds and token counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestRecord:
    """One request that ended.

    Attributes:
        scheduled_ns: when the request was due; in a closed loop, when its slot became free.
        sent_ns: when its bytes were passed to gRPC.
        done_ns: when its last token, or its error, arrived.
        input_tokens: number of tokens of the prompt.
        chunk_ns: arrival times of the answers that contain new tokens; one without streaming.
        chunk_tokens: number of new tokens in each of these answers.
        is_streamed: whether the answers were streamed.
        error: why the request failed; empty if it succeeded.
        is_cancelled: whether the client hung up before the last token, as it meant to.
        is_of_schedule: whether it belongs to an open loop, whose latencies count from when a request was due: a wait
            in the client is no less a wait. Those of a closed loop count from the send.
        lag_ns: the part of the wait before the send that the client's own work took, not the limit of what may be in
            flight.
    """

    scheduled_ns: int
    sent_ns: int
    done_ns: int
    input_tokens: int
    chunk_ns: tuple[int, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    is_streamed: bool = False
    error: str = ""
    is_cancelled: bool = False
    is_of_schedule: bool = False
    lag_ns: int = 0

    @property
    def began_ns(self) -> int:
        """Time that latencies count from."""
        return self.scheduled_ns if self.is_of_schedule else self.sent_ns

    @property
    def is_complete(self) -> bool:
        """Whether it succeeded and has all its tokens: only then is it in figures."""
        return not self.error and not self.is_cancelled

    @property
    def output_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(self.chunk_tokens)


@dataclass(frozen=True)
class Window:
    """Consecutive answers: one repeat of a measurement, or several joined.

    Attributes:
        records: requests in the order in which they ended.
        started_ns: when the last answer before the window arrived, or its first request was sent.
        ended_ns: when the last answer of the window arrived.
        backlog: requests or conversations that were due and had not ended then; None where it was not noted.
        arrivals: requests that became due during the window; None in a closed loop, and where it was not noted.
    """

    records: tuple[RequestRecord, ...]
    started_ns: int
    ended_ns: int
    backlog: int | None = None
    arrivals: int | None = None

    @property
    def succeeded(self) -> tuple[RequestRecord, ...]:
        """Requests that succeeded and were not cancelled."""
        return tuple(record for record in self.records if record.is_complete)

    @property
    def duration_ns(self) -> int:
        """Wall time of the window."""
        return self.ended_ns - self.started_ns


def join(windows: Sequence[Window]) -> Window:
    """Join windows into one that lasts as long as they do together; pauses between them do not count."""
    records = tuple(record for window in windows for record in window.records)
    started_ns = windows[0].started_ns if windows else 0
    noted = [window.arrivals for window in windows if window.arrivals is not None]
    arrivals = sum(noted) if noted and len(noted) == len(windows) else None
    backlog = windows[-1].backlog if windows else None
    return Window(records, started_ns, started_ns + sum(window.duration_ns for window in windows), backlog, arrivals)
