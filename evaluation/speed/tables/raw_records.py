"""The requests of each point on disk, from which every figure of its row can be computed again.

``requests.csv.gz`` has a row for each request in the order in which they ended, and ``requests.json`` what belongs to
the point as a whole. Times are monotonic nanoseconds since the first repeat began: they are small enough to be exact
in floating point, and negative during the warm-up.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.speed.tables.cells import plain, unquoted
from evaluation.speed.tables.record import RequestRecord, Window
from evaluation.speed.tables.row import SCHEMA_VERSION, Row
from handover.durable import sync, temporary_beside, write_atomically
from handover.errors import ArtefactError, shortened

REQUESTS = "requests.csv.gz"
POINT = "requests.json"
COLUMNS = (
    *("repeat", "scheduled_ns", "sent_ns", "first_token_ns", "last_token_ns", "ended_ns"),
    *("input_tokens", "output_tokens", "status", "error", "answers", "token_ns", "token_counts", "client_lag_ns"),
)
OK, FAILED, CANCELLED = "ok", "failed", "cancelled"
DUE, SENT = "scheduled_ns", "sent_ns"
"""The column that the latencies of a point count from."""
ORIGIN = ("model", "engine", "model_digest", "workload", "load", "commit", "cpu", "gpu")
"""What a point's file repeats of its row, so that it can be understood without the table."""
MOST_REQUESTS = 500_000
MOST_TOKEN_TIMES = 2_000_000
"""Limits of one point's file, about 40 MB together. Times above the second are left out of ``token_ns``."""
_ERROR_LENGTH = 500

Counters = Mapping[str, float]


@dataclass(frozen=True)
class PointRecords:
    """The raw data of one point.

    Attributes:
        windows: the repeats.
        warmups: requests before the first repeat.
        slos: limits of a good request in ms, by the name of a distribution.
        counters: the server's counters before and after the repeats; empty where the server has none.
        requests_left_out, token_times_left_out: what the files do not hold because of their limits.
        started_at: wall clock at the origin of the times, UTC; empty where it is unknown.
        origin: what was measured, and by what: names and values for people.
    """

    windows: tuple[Window, ...]
    warmups: tuple[RequestRecord, ...] = ()
    slos: Mapping[str, float] = field(default_factory=dict)
    counters: tuple[Counters, Counters] = ({}, {})
    requests_left_out: int = 0
    token_times_left_out: int = 0
    started_at: str = ""
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        """The measured requests, in the order in which they ended."""
        return tuple(record for window in self.windows for record in window.records)

    @property
    def origin_ns(self) -> int:
        """Time that the files count from: when the first repeat began."""
        if self.windows:
            return self.windows[0].started_ns
        return self.warmups[0].sent_ns if self.warmups else 0

    def numbered(self) -> Iterator[tuple[int, RequestRecord]]:
        """Yield every request with the number of its repeat, from 1; those of the warm-up have 0."""
        for record in self.warmups:
            yield 0, record
        for number, window in enumerate(self.windows, 1):
            for record in window.records:
                yield number, record


def origin_of(row: Row) -> dict[str, str]:
    """Return ORIGIN of a point, as its file has it."""
    return {name: row.label if name == "load" else str(row.value(name)) for name in ORIGIN}


def write_records(
    directory: Path, point: PointRecords, most_requests: int = MOST_REQUESTS, most_token_times: int = MOST_TOKEN_TIMES
) -> None:
    """Write both files of a point; requests and token times above the limits are counted in ``requests.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    origin_ns, room = point.origin_ns, most_token_times
    rows: list[Sequence[object]] = [COLUMNS]
    requests_left_out = token_times_left_out = 0
    for repeat, record in point.numbered():
        if len(rows) > most_requests:
            requests_left_out += 1
            continue
        has_times = len(record.chunk_ns) <= room
        room -= len(record.chunk_ns) if has_times else 0
        token_times_left_out += 0 if has_times else len(record.chunk_ns)
        rows.append(_cells(repeat, record, origin_ns, has_times))
    _write_table(directory / REQUESTS, rows)
    content = {
        "schema_version": SCHEMA_VERSION,
        **point.origin,
        "clock": "monotonic nanoseconds since the first repeat began",
        "started_at": point.started_at,
        "latencies_count_from": DUE if any(record.is_of_schedule for record in point.records) else SENT,
        "requests": len(point.records),
        "warmup_requests": len(point.warmups),
        "repeats_ns": [[window.started_ns - origin_ns, window.ended_ns - origin_ns] for window in point.windows],
        "backlogs": [window.backlog for window in point.windows],
        "arrivals": [window.arrivals for window in point.windows],
        "slos_ms": dict(point.slos),
        "server_counters": [dict(counters) for counters in point.counters],
        "requests_left_out": requests_left_out,
        "token_times_left_out": token_times_left_out,
    }
    write_atomically(directory / POINT, json.dumps(content) + "\n")


def read_records(directory: Path) -> PointRecords | None:
    """Read what ``write_records`` wrote; None for a point of an earlier version, which has neither file.

    A streamed request whose token times were left out has its first and its last token only.

    Raises:
        ArtefactError: one of the files is missing or damaged.
    """
    if not (directory / REQUESTS).exists() and not (directory / POINT).exists():
        return None
    try:
        about = json.loads((directory / POINT).read_text())
        with gzip.open(directory / REQUESTS, "rt", newline="", encoding="utf-8") as stream:
            return _point(about, csv.DictReader(stream))
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, csv.Error) as error:
        raise ArtefactError(f"the records of {directory} are damaged: {error!r}", "measure the point again") from error


def _cells(repeat: int, record: RequestRecord, origin_ns: int, has_times: bool) -> tuple[object, ...]:
    times = [time_ns - origin_ns for time_ns in record.chunk_ns]
    is_single = all(count == 1 for count in record.chunk_tokens)
    return (
        repeat,
        *(record.scheduled_ns - origin_ns, record.sent_ns - origin_ns),
        times[0] if times and record.is_streamed else "",
        times[-1] if times else "",
        record.done_ns - origin_ns,
        *(record.input_tokens, record.output_tokens, _status(record)),
        plain(shortened(record.error, _ERROR_LENGTH)),
        len(times),
        " ".join(map(str, times)) if has_times else "",
        "" if is_single or not has_times else " ".join(map(str, record.chunk_tokens)),
        record.lag_ns,
    )


def _status(record: RequestRecord) -> str:
    return FAILED if record.error else CANCELLED if record.is_cancelled else OK


def _write_table(path: Path, rows: Iterable[Sequence[object]]) -> None:
    temporary = temporary_beside(path)
    try:
        # Without name and time in its head, the file of equal records is the same to the byte.
        with (
            temporary.open("wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
            io.TextIOWrapper(packed, encoding="utf-8", newline="") as stream,
        ):
            csv.writer(stream, lineterminator="\n").writerows(rows)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _point(about: Mapping[str, Any], rows: Iterable[Mapping[str, str]]) -> PointRecords:
    is_of_schedule = about.get("latencies_count_from") == DUE  # earlier versions counted from the send
    repeats: list[list[RequestRecord]] = [[] for _ in range(len(about["repeats_ns"]) + 1)]
    for cells in rows:
        repeats[int(cells["repeat"])].append(_record(cells, is_of_schedule))
    unknown = [None] * len(about["repeats_ns"])  # earlier versions did not note them
    bounds, backlogs, arrivals = about["repeats_ns"], about.get("backlogs") or unknown, about.get("arrivals") or unknown
    windows = [
        Window(tuple(records), int(started_ns), int(ended_ns), backlog, arrived)
        for records, (started_ns, ended_ns), backlog, arrived in zip(
            repeats[1:], bounds, backlogs, arrivals, strict=True
        )
    ]
    before, after = about["server_counters"]
    return PointRecords(
        tuple(windows),
        tuple(repeats[0]),
        dict(about["slos_ms"]),
        (dict(before), dict(after)),
        int(about["requests_left_out"]),
        int(about["token_times_left_out"]),
        about.get("started_at", ""),
        {name: about[name] for name in ORIGIN if name in about},
    )


def _record(cells: Mapping[str, str], is_of_schedule: bool) -> RequestRecord:
    is_streamed, generated = bool(cells["first_token_ns"]), int(cells["output_tokens"])
    times = tuple(map(int, cells["token_ns"].split()))
    counts = tuple(map(int, cells["token_counts"].split())) or (1,) * len(times)
    if int(cells["answers"]) > len(times):  # left out: the first and the last token remain
        ends = (int(cells["first_token_ns"]), int(cells["last_token_ns"])) if is_streamed else ()
        times, counts = ends or (int(cells["last_token_ns"]),), (1, generated - 1) if ends else (generated,)
    if sum(counts) != generated or len(counts) != len(times):
        raise ValueError(f"a request of {generated} tokens has {len(times)} times and {sum(counts)} tokens in them")
    return RequestRecord(
        int(cells["scheduled_ns"]),
        int(cells["sent_ns"]),
        int(cells["ended_ns"]),
        int(cells["input_tokens"]),
        times,
        counts,
        is_streamed,
        unquoted(cells["error"]) or ("failed" if cells["status"] == FAILED else ""),
        cells["status"] == CANCELLED,
        is_of_schedule,
        int(cells.get("client_lag_ns") or 0),
    )
