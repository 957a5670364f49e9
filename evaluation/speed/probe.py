"""One rate of a search: how long it is measured, and the verdict on it.

A rate holds only if its backlog does not grow: not with confidence, and with confidence by less than half of the
search's precision (of the arrivals). Otherwise its latencies are those of the time that was measured, and a longer one
would have others. Where that is not known the rate is measured for longer; at the end of the time the whole precision
is enough. It is exceeded where the backlog grows by more than the precision with confidence, and at the end of the time
where it has grown at all; but not where the client was late itself.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence

from evaluation.speed.drive import MeasuringPlan
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.tables.backlog import Growth, growth_figures, measure_growth
from evaluation.speed.tables.formulas import NANOSECONDS_PER_MS, NANOSECONDS_PER_S
from evaluation.speed.tables.formulas import percentile as percentile_of
from evaluation.speed.tables.record import Window
from evaluation.speed.tables.slo_verdict import BACKLOG, EXCEEDED, HOLDS, UNDECIDED, Judge, Judgement, judge
from evaluation.speed.tables.table import SLO_FIGURES, Row

_WINDOWS = 20
_LEAST_REQUESTS, _WARMUP = 10, 20
_FEWEST_EXCEEDED = 60
"""Requests before a rate is given up: what a hiccup delays is delayed together."""
_FEWEST_HELD = 500
"""Requests before a rate holds, but at the end of the time: fewer do not show how long a queue may remain long."""
_EARLY_LOOKS, _EARLY_STRICTNESS = (0.25, 0.5), 1.5
CLIENT_LAG = "client_lag"
"""What takes the place of a limit's name where the client itself was late."""
_LAG_PERCENTILE, _MOST_LAG = 99, 0.1
"""Most that this percentile of the client's own lag may be, as a share of the smallest limit."""


def plan_probe(arguments: LoadArguments, row: Row, advance: Callable[[], None]) -> MeasuringPlan:
    """Plan a rate: it is measured until the limits hold or are exceeded with confidence.

    Whoever looks often enough sees everything by chance. So there are few looks: at a quarter and at half of the
    duration only for what is exceeded by far, then after the duration and each time that it has doubled. What was
    exceeded once does not hold before the end of the time.
    """
    percentile = arguments.search_percentile
    assert percentile is not None
    requests = Judge(dict(arguments.slos), percentile)
    looks = iter(look_times_s(arguments))
    next_look_s = [next(looks)]

    def is_enough(windows: Sequence[Window]) -> bool:
        advance()
        requests.add(windows[-1].records)
        lasted_s = _lasted_s(windows)
        if lasted_s < next_look_s[0]:
            return False
        while lasted_s >= next_look_s[0]:
            next_look_s[0] = next(looks, math.inf)
        if lasted_s < arguments.search_duration_s:
            of_limits = requests.judgement(_EARLY_STRICTNESS)
            is_known = of_limits.verdict == EXCEEDED and requests.count >= _FEWEST_EXCEEDED
            return is_known and not may_be_the_clients(arguments, windows, of_limits.limit)
        if _is_final(arguments, windows):
            return True
        verdict = _judge_rate(arguments, row, requests.judgement(), windows).verdict
        return verdict == EXCEEDED or (verdict == HOLDS and row.probe is None and requests.count >= _FEWEST_HELD)

    each = max(_LEAST_REQUESTS, math.ceil(row.level * arguments.search_duration_s / _WINDOWS))
    longest_s = arguments.search_max_duration_s + arguments.max_point_s
    return MeasuringPlan(arguments.warmup or _WARMUP, each, sys.maxsize, longest_s, is_enough)


def look_times_s(arguments: LoadArguments) -> list[float]:
    """Return the seconds of measuring after which a rate is judged, ascending."""
    times_s, last_s = [arguments.search_duration_s * share for share in _EARLY_LOOKS], arguments.search_max_duration_s
    time_s = arguments.search_duration_s
    while time_s < last_s:
        times_s.append(time_s)
        time_s *= 2
    return [*times_s, last_s]


def may_be_the_clients(arguments: LoadArguments, windows: Sequence[Window], limit: str) -> bool:
    """Whether limits were exceeded by no more than the client's own work may have delayed requests.

    A client that was late by a small share of the limit is no matter. Otherwise no end of a request was later by more
    than the largest lag: that is what a queue makes of arrivals that are late by at most so much.
    """
    records = [record for window in windows for record in window.records]
    lags_ms = [record.lag_ns / NANOSECONDS_PER_MS for record in records]
    lag_ms = percentile_of(lags_ms, _LAG_PERCENTILE)
    if lag_ms is None or lag_ms <= _MOST_LAG * min(limit_ms for _, limit_ms in arguments.slos):
        return False
    later = {name: limit_ms + max(lags_ms) for name, limit_ms in arguments.slos}
    percentile = arguments.search_percentile
    assert percentile is not None
    return limit == BACKLOG or judge(records, later, percentile).verdict != EXCEEDED


def longest_probe(arguments: LoadArguments) -> int:
    """Return the largest number of repeats of a rate that a search measures."""
    return math.ceil(_WINDOWS * arguments.search_max_duration_s / arguments.search_duration_s)


def with_verdict(arguments: LoadArguments, row: Row, windows: Sequence[Window]) -> Row:
    """Fill in the verdict on a measured rate and the figures that it follows from; other points stay as they are."""
    if arguments.search_percentile is None:
        return row
    records = [record for window in windows for record in window.records]
    of_limits = judge(records, dict(arguments.slos), arguments.search_percentile)
    judged = _judge_rate(arguments, row, of_limits, windows)
    shares = of_limits.share, of_limits.low, of_limits.high
    return dataclasses.replace(
        row,
        slo_verdict=judged.verdict,
        slo_limit=judged.limit,
        is_stable=judged.verdict != UNDECIDED,
        figures={**row.figures, **dict(zip(SLO_FIGURES, shares, strict=True)), **growth_figures(windows)},
    )


def judge_backlog(growth: Growth | None, most_per_s: float, is_final: bool) -> str:
    """Return HOLDS where answers keep up with arrivals, EXCEEDED where they do not, UNDECIDED where it is not known.

    Args:
        growth: of the backlog; None if it is not known.
        most_per_s: the search's precision at this rate, in requests per second.
        is_final: whether the rate is not measured for longer: then any growth is one that did not end.
    """
    if growth is None:
        return UNDECIDED
    if growth.is_below(most_per_s if is_final else most_per_s / 2):
        return HOLDS
    return EXCEEDED if growth.is_above(0.0 if is_final else most_per_s) else UNDECIDED


def _judge_rate(arguments: LoadArguments, row: Row, of_limits: Judgement, windows: Sequence[Window]) -> Judgement:
    """Join the verdict on the limits with that on the backlog; what may be the client's fault is not exceeded."""
    judged = _join(arguments, row, of_limits, windows)
    if judged.verdict == EXCEEDED and may_be_the_clients(arguments, windows, judged.limit):
        return dataclasses.replace(judged, verdict=UNDECIDED, limit=CLIENT_LAG)
    return judged


def _join(arguments: LoadArguments, row: Row, of_limits: Judgement, windows: Sequence[Window]) -> Judgement:
    if of_limits.verdict == EXCEEDED:
        return of_limits
    most_per_s = arguments.search_precision * row.level
    of_backlog = judge_backlog(measure_growth(windows), most_per_s, _is_final(arguments, windows))
    if of_backlog == HOLDS or (of_backlog == UNDECIDED and of_limits.verdict == UNDECIDED):
        return of_limits
    return dataclasses.replace(of_limits, verdict=of_backlog, limit=BACKLOG)


def _is_final(arguments: LoadArguments, windows: Sequence[Window]) -> bool:
    return _lasted_s(windows) >= arguments.search_max_duration_s


def _lasted_s(windows: Sequence[Window]) -> float:
    return (windows[-1].ended_ns - windows[0].started_ns) / NANOSECONDS_PER_S
