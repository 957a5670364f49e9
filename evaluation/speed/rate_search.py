"""Search for the highest request rate at which the SLOs hold: doubling from the lowest rate, then bisection.

A rate at which they neither hold nor are exceeded with confidence counts as one at which they were not shown to hold.
The answer is an interval: from the highest rate that holds to the lowest that is exceeded.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.speed.backlog import BACKLOG_FIGURES
from evaluation.speed.cells import csv_text
from evaluation.speed.provenance import timestamp
from evaluation.speed.slo_verdict import EXCEEDED, HOLDS
from evaluation.speed.sweep import Sweep
from evaluation.speed.table import OK, SLO_FIGURES, Row
from handover.durable import write_atomically

SEARCH = "search"
_DIGITS = 5


@dataclass
class RateSearch:
    """Bisection on the request rate.

    Attributes:
        low, high: lowest and highest rate to measure, in requests per second.
        precision: the search ends where the rates that hold and do not are this close, relative.
        held: highest rate that holds; None if none does.
        exceeded: lowest rate that is exceeded with confidence; None if there is none.
        verdicts: by rate.
    """

    low: float
    high: float
    precision: float
    held: float | None = None
    exceeded: float | None = None
    verdicts: dict[float, str] = field(default_factory=dict)

    @property
    def not_held(self) -> float | None:
        """Lowest rate above those that hold that was not shown to hold; None if there is none."""
        above = [rate for rate, verdict in self.verdicts.items() if verdict != HOLDS and rate > (self.held or 0)]
        return min(above, default=None)

    def next_rate(self) -> float | None:
        """Return the rate to measure next; None at the end of the search."""
        if not self.verdicts:
            return self.low
        if self.not_held is None or self.held is None:
            # A low rate may stay undecided for want of requests, of which a higher one has more.
            highest = max(self.verdicts)
            is_over = highest >= self.high or self.exceeded is not None
            return None if is_over else _rounded(min(2 * highest, self.high))
        if self.not_held <= self.held * (1 + self.precision):
            return None
        middle = _rounded(math.sqrt(self.held * self.not_held))
        return middle if self.held < middle < self.not_held else None

    def add(self, rate: float, verdict: str) -> None:
        """Take the verdict on a rate."""
        self.verdicts[rate] = verdict
        if verdict == HOLDS:
            self.held = rate if self.held is None else max(rate, self.held)
        if verdict == EXCEEDED:
            self.exceeded = rate if self.exceeded is None else min(rate, self.exceeded)


@dataclass(frozen=True)
class FoundRate:
    """What a search found for one workload; the fields are the columns of ``search.csv``.

    Attributes:
        rate_per_s: highest request rate at which the SLOs hold; None if they hold at none.
        exceeded_at_per_s: lowest rate at which they are exceeded; None where the highest rate of the search holds.
        requests_per_s, output_tokens_per_s: measured at ``rate_per_s``.
        probes, undecided: number of rates that were measured, and of those without a verdict.
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

    def __str__(self) -> str:
        limits = f"p{self.percentile:g} of {self.slos}"
        remark = f" ({self.remark})" if self.remark else ""
        if self.rate_per_s is None:
            return f"{self.workload}: {limits} was not shown to hold at the lowest rate{remark}"
        above = (
            "no higher rate of the search was exceeded"
            if self.exceeded_at_per_s is None
            else f"exceeded at {self.exceeded_at_per_s:g}"
        )
        tokens = "" if self.output_tokens_per_s is None else f", {self.output_tokens_per_s:.1f} tokens/s"
        return f"{self.workload}: {limits} holds at {self.rate_per_s:g} requests/s{tokens}; {above}{remark}"


def search_rates(
    sweep: Sweep,
    new_search: Callable[[], RateSearch],
    percentile: float,
    slos: Mapping[str, float],
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
            point = dataclasses.replace(template, request_rate_per_s=rate)
            row = kept.get(point.point)
            if row is None:
                *_, row = dataclasses.replace(sweep, points=(*rows, point)).run(known=rows)
            search.add(rate, row.slo_verdict if row.state == OK else EXCEEDED)
            rows.append(row)
            measured.append(row)
        found.append(_found(search, measured, percentile, slos))
    return rows, found


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


def _found(search: RateSearch, rows: Sequence[Row], percentile: float, slos: Mapping[str, float]) -> FoundRate:
    best = next((row for row in rows if row.level == search.held), None)
    first, figures = rows[0], {} if best is None else best.figures
    return FoundRate(
        model=first.model,
        workload=first.workload,
        percentile=percentile,
        slos=", ".join(f"{name} {limit:g} ms" for name, limit in slos.items()),
        rate_per_s=search.held,
        exceeded_at_per_s=search.exceeded,
        requests_per_s=figures.get("requests_per_s"),
        output_tokens_per_s=figures.get("output_tokens_per_s"),
        probes=len(rows),
        undecided=sum(verdict not in (HOLDS, EXCEEDED) for verdict in search.verdicts.values()),
        remark=first.remark,
        model_digest=first.model_digest,
        timestamp=timestamp(),
    )


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")
