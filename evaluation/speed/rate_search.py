"""Search for the highest request rate at which the SLOs hold: doubling from the lowest rate, then bisection.

A rate at which they neither hold nor are exceeded with confidence counts as one at which they were not shown to hold.
The lowest rate that is exceeded is measured once more, with other arrivals: what exceeded the limits once may have been
a hiccup. The answer is an interval: from the highest rate that holds to the lowest that is exceeded. It contains the
true rate with CONFIDENCE, as simulated queues whose true rate is known show (tests/evaluation/test_search_truth.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.speed.provenance import timestamp
from evaluation.speed.sweep import Sweep
from evaluation.speed.tables.backlog import BACKLOG_FIGURES
from evaluation.speed.tables.cells import csv_text
from evaluation.speed.tables.slo_verdict import EXCEEDED, HOLDS, UNDECIDED
from evaluation.speed.tables.table import OK, SEARCH, SLO_FIGURES, Row
from handover.durable import write_atomically

CONFIDENCE = 0.95
FAILED = "failed"
"""Verdict on a rate at which no request succeeded: that is no load that the server was too slow for."""
_TRIES = 2
Point = tuple[str, str, float]
_OF_THE_ROW = (
    *("engine", "versions", "flags", "gpus", "commit", "cpu", "cores", "gpu", "started_at", "settings_fingerprint"),
    *("is_random_weights", "validity", "validity_reasons", "schema_version"),
)
_DIGITS = 5


@dataclass
class RateSearch:
    """Bisection on the request rate.

    Attributes:
        low, high: lowest and highest rate to measure, in requests per second.
        precision: the search ends where the rates that hold and do not are this close, relative.
        verdicts: by rate, of its last measurement.
        confirmed: rates that were measured a second time.
    """

    low: float
    high: float
    precision: float
    verdicts: dict[float, str] = field(default_factory=dict)
    confirmed: set[float] = field(default_factory=set)

    @property
    def held(self) -> float | None:
        """Highest rate that holds; None if none does."""
        return max((rate for rate, verdict in self.verdicts.items() if verdict == HOLDS), default=None)

    @property
    def exceeded(self) -> float | None:
        """Lowest rate above those that hold that is exceeded with confidence; None if there is none."""
        return self._lowest_above(self.held, EXCEEDED)

    @property
    def not_held(self) -> float | None:
        """Lowest rate above those that hold that was not shown to hold; None if there is none."""
        return self._lowest_above(self.held, EXCEEDED, UNDECIDED, FAILED)

    def next_rate(self) -> float | None:
        """Return the rate to measure next, at last the lowest exceeded one for the second time; None at the end."""
        if not self.verdicts:
            return self.low
        rate = self._higher() or self._between(self.held, self.not_held) or self._between(self._doubted, self.exceeded)
        if rate is not None:
            return rate
        return None if self.exceeded in self.confirmed else self.exceeded

    def add(self, rate: float, verdict: str) -> None:
        """Take the verdict on a rate; the second one on a rate replaces the first."""
        if rate in self.verdicts:
            self.confirmed.add(rate)
        self.verdicts[rate] = verdict

    @property
    def _doubted(self) -> float | None:
        """Highest rate below the exceeded one that stayed undecided, and not for want of requests: above those held."""
        above, below = self.held, self.exceeded
        if above is None or below is None:
            return None
        undecided = [rate for rate, verdict in self.verdicts.items() if verdict == UNDECIDED and above < rate < below]
        return max(undecided, default=None)

    def _lowest_above(self, bound: float | None, *verdicts: str) -> float | None:
        found = (rate for rate, verdict in self.verdicts.items() if verdict in verdicts and rate > (bound or 0))
        return min(found, default=None)

    def _higher(self) -> float | None:
        """Double the rate, as long as nothing shows an upper end; a low one may stay undecided for want of requests."""
        highest = max(self.verdicts)
        is_bounded = self.exceeded is not None or FAILED in self.verdicts.values() or highest >= self.high
        return None if is_bounded else _rounded(min(2 * highest, self.high))

    def _between(self, low: float | None, high: float | None) -> float | None:
        """Return the geometric mean of two rates; None where they are close enough, or one is missing."""
        if low is None or high is None or high <= low * (1 + self.precision):
            return None
        middle = _rounded(math.sqrt(low * high))
        return middle if low < middle < high else None


@dataclass(frozen=True)
class FoundRate:
    """What a search found for one workload; the fields are the columns of ``search.csv``.

    Attributes:
        rate_per_s: highest request rate at which the SLOs hold, not above what its arrivals came to; None if they hold
            at none.
        exceeded_at_per_s: lowest rate at which they are exceeded, not below what its arrivals came to; None where none
            is.
        requests_per_s, output_tokens_per_s: measured at ``rate_per_s``.
        probes, undecided: number of measurements, and of rates without a verdict.
        confidence: that the true rate lies between both.
        is_confirmed: whether the exceeded rate was exceeded twice.
        failed: number of rates at which no request succeeded.
        nominal_rate_per_s: the rate of the arrivals that ``rate_per_s`` was measured with.
        engine, ..., validity_reasons: of the row that holds, else of the first.
    """

    model: str
    workload: str
    percentile: float
    slos: str
    rate_per_s: float | None
    exceeded_at_per_s: float | None
    requests_per_s: float | None
    output_tokens_per_s: float | None
    probes: int
    undecided: int
    remark: str
    model_digest: str
    timestamp: str
    confidence: float
    is_confirmed: bool
    failed: int
    nominal_rate_per_s: float | None
    engine: str
    versions: str
    flags: str
    gpus: int | None
    commit: str
    cpu: str
    cores: int | None
    gpu: str
    started_at: str
    settings_fingerprint: str
    is_random_weights: bool
    validity: str
    validity_reasons: str
    schema_version: int | None

    def __str__(self) -> str:
        limits = f"p{self.percentile:g} of {self.slos}"
        remark = f" ({self.remark})" if self.remark else ""
        if self.rate_per_s is None:
            return f"{self.workload}: {limits} was not shown to hold at the lowest rate{remark}"
        if self.exceeded_at_per_s is None:
            above = "no rate of the search above it was exceeded"
        else:
            twice = "" if self.is_confirmed else ", not confirmed"
            above = f"exceeded at {self.exceeded_at_per_s:g}{twice}; the true rate lies between ({self.confidence:.0%})"
        tokens = "" if self.output_tokens_per_s is None else f", {self.output_tokens_per_s:.1f} tokens/s"
        return f"{self.workload}: {limits} holds at {self.rate_per_s:g} requests/s{tokens}; {above}{remark}"


def search_rates(
    sweep: Sweep, new_search: Callable[[], RateSearch], percentile: float, slos: Mapping[str, float]
) -> tuple[list[Row], list[FoundRate]]:
    """Search for each workload of a sweep; rows of an interrupted search are taken as they are.

    Args:
        sweep: a point for each workload, whose rate does not matter.
        new_search: begins a search.
        percentile: of the requests.
        slos: limits in milliseconds.
    """
    kept, rows, found = sweep.finished_rows(), list[Row](), list[FoundRate]()
    for template in sweep.points:
        search, measured = new_search(), list[Row]()
        while (rate := search.next_rate()) is not None:
            row = _measure(sweep, kept, rows, dataclasses.replace(template, request_rate_per_s=rate), search)
            search.add(rate, row.slo_verdict if row.state == OK else FAILED)
            measured.append(row)
        found.append(summarise(search, measured, percentile, slos))
    return rows, found


def _measure(sweep: Sweep, kept: Mapping[Point, Row], rows: list[Row], point: Row, search: RateSearch) -> Row:
    """Measure a rate, or take it from an interrupted search; one at which no request succeeds is tried once more."""
    if point.level in search.verdicts:
        point = dataclasses.replace(point, probe=2)
    row = kept.get(point.point)
    for _ in range(_TRIES):
        if row is not None and row.state == OK:
            break
        *_, row = dataclasses.replace(sweep, points=(*rows, point)).run(known=rows)
    assert row is not None
    rows.append(row)
    return row


def write_found(output: Path, found: Sequence[FoundRate], rows: Sequence[Row]) -> None:
    """Write ``search.json`` and ``search.csv``."""
    probes = [
        {"workload": row.workload, "rate_per_s": row.level, "verdict": row.slo_verdict, "limit": row.slo_limit}
        | {name: row.value(name) for name in (*SLO_FIGURES, *BACKLOG_FIGURES, "requests")}
        for row in rows
    ]
    entries = [dataclasses.asdict(one) for one in found]
    write_atomically(output / f"{SEARCH}.json", json.dumps({"found": entries, "probes": probes}, indent=1) + "\n")
    names = [entry.name for entry in dataclasses.fields(FoundRate)]
    write_atomically(
        output / f"{SEARCH}.csv", csv_text([names, *([entry[name] for name in names] for entry in entries)])
    )


def summarise(search: RateSearch, rows: Sequence[Row], percentile: float, slos: Mapping[str, float]) -> FoundRate:
    """Return what the search of one workload found, which is between what its arrivals came to."""
    best = next((row for row in reversed(rows) if row.level == search.held), None)
    over = [_offered_per_s(row) for row in rows if row.level == search.exceeded and row.slo_verdict == EXCEEDED]
    shown, figures = best or rows[0], {} if best is None else best.figures
    return FoundRate(
        model=shown.model,
        workload=shown.workload,
        percentile=percentile,
        slos=", ".join(f"{name} {limit:g} ms" for name, limit in slos.items()),
        rate_per_s=None if best is None else min(best.level, _offered_per_s(best)),
        exceeded_at_per_s=None if search.exceeded is None else max(search.exceeded, *over),
        requests_per_s=figures.get("requests_per_s"),
        output_tokens_per_s=figures.get("output_tokens_per_s"),
        probes=len(rows),
        undecided=sum(verdict == UNDECIDED for verdict in search.verdicts.values()),
        remark=shown.remark,
        model_digest=shown.model_digest,
        timestamp=timestamp(),
        confidence=CONFIDENCE,
        is_confirmed=search.exceeded in search.confirmed,
        failed=sum(verdict == FAILED for verdict in search.verdicts.values()),
        nominal_rate_per_s=search.held,
        **{name: shown.value(name) for name in _OF_THE_ROW},
    )


def _offered_per_s(row: Row) -> float:
    """Return what the arrivals of a rate came to: a short measurement of Poisson arrivals has others than its rate."""
    return row.figures.get("offered_requests_per_s") or row.level


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")
