"""Whether a percentile of the requests keeps every limit, with confidence.

For each limit, the share of requests within it is an estimate with a 99% interval: Wilson's, for as many independent
requests as the spread between batches of consecutive requests shows, since requests that queue behind each other are no
independent ones. Where few requests miss the limit, their spread shows little: then that of the slowest tenth counts,
which bunches in a queue as the slowest hundredth does. The limit holds if the whole interval is at least the
percentile, it is exceeded if the whole interval is below, and undecided otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from evaluation.speed.tables.figures import BY_NAME
from evaluation.speed.tables.record import RequestRecord

HOLDS, EXCEEDED, UNDECIDED = "holds", "exceeded", "undecided"
BACKLOG = "backlog"
"""What takes the place of a limit's name where every limit is kept and answers do not keep up with arrivals."""
_Z_99 = 2.5758
_STUDENT_99 = 2.861
"""0.995 quantile of Student's distribution for 19 degrees of freedom: the spread of 20 batches is estimated, too."""
_BATCHES = 20
_SLOWEST = 0.1
_LARGEST_CORRELATION = 0.9
_FEWEST_REQUESTS = 80
"""The growth of the backlog takes eight windows of at least ten requests."""


@dataclass(frozen=True)
class Judgement:
    """Whether every limit holds, and the limit that is kept by the fewest requests.

    Attributes:
        verdict: HOLDS, EXCEEDED or UNDECIDED.
        limit: name of that limit's distribution, or BACKLOG; empty without requests.
        share: share of requests within it.
        low, high: 99% interval of the share.
    """

    verdict: str
    limit: str = ""
    share: float | None = None
    low: float | None = None
    high: float | None = None


def judge(records: Sequence[RequestRecord], slos: Mapping[str, float], percentile: float) -> Judgement:
    """Judge whether ``percentile`` of 100 requests keep each limit.

    Args:
        records: requests that ended; one that failed exceeds every limit, one that was cancelled does not count.
        slos: limits in milliseconds by the name of a distribution, at least one.
        percentile: above 0 and below 100.
    """
    requests = Judge(slos, percentile)
    requests.add(records)
    return requests.judgement()


class Judge:
    """Judges requests that come by and by, and looks at each once: a measurement goes on meanwhile.

    Args:
        slos: limits in milliseconds by the name of a distribution, at least one.
        percentile: above 0 and below 100.
    """

    def __init__(self, slos: Mapping[str, float], percentile: float) -> None:
        self._slos, self._wanted = slos, percentile / 100
        self._taken: list[tuple[int, tuple[float, ...]]] = []

    @property
    def count(self) -> int:
        """Number of requests that were judged."""
        return len(self._taken)

    def add(self, records: Iterable[RequestRecord]) -> None:
        """Take requests that ended; one that failed exceeds every limit, one that was cancelled does not count."""
        for record in records:
            if not record.is_cancelled:
                self._taken.append((record.scheduled_ns, tuple(observed_ms(record, name) for name in self._slos)))

    def judgement(self, strictness: float = 1.0) -> Judgement:
        """Judge all requests so far, in the order in which they were due.

        Args:
            strictness: how many times wider than the 99% interval the one is that decides; for looks before the end.
        """
        self._taken.sort()
        columns = zip(*(times for _, times in self._taken), strict=True) if self._taken else [()] * len(self._slos)
        judged = [
            _judge_limit(name, times_ms, limit_ms, self._wanted, strictness)
            for (name, limit_ms), times_ms in zip(self._slos.items(), columns, strict=True)
        ]
        worst = min(judged, key=lambda judgement: judgement.share if judgement.share is not None else -1.0)
        verdicts = {judgement.verdict for judgement in judged}
        verdict = EXCEEDED if EXCEEDED in verdicts else UNDECIDED if UNDECIDED in verdicts else HOLDS
        return Judgement(verdict, worst.limit, worst.share, worst.low, worst.high)


def observed_ms(record: RequestRecord, name: str) -> float:
    """Return a duration of a request of an open loop: none is without an end that failed or has no such duration.

    One token has no time between tokens, and keeps every limit on it.
    """
    if record.error:
        return math.inf
    if not record.is_of_schedule:  # as earlier versions recorded it
        record = replace(record, is_of_schedule=True)
    values = BY_NAME[name].values_ms([record])
    if values:
        return max(values)
    return 0.0 if name in ("tpot", "itl") and record.output_tokens == 1 else math.inf


def fewest_requests(percentile: float) -> int:
    """Return the number of requests below which a rate cannot hold with confidence, even if all keep the limits."""
    return max(_FEWEST_REQUESTS, math.ceil(_Z_99**2 * percentile / (100 - percentile)))


def share_interval(
    kept: Sequence[bool], least_effect: float = 1.0, strictness: float = 1.0
) -> tuple[float, float, float]:
    """Return the share of True and its 99% interval; the values are in the order of time and may be correlated.

    The number of values is divided by the design effect: the variance of the means of batches over what it would be
    for independent values.

    Args:
        kept: the values.
        least_effect: a design effect that is known from elsewhere.
        strictness: of the interval: how many times as many standard deviations as 99% take.
    """
    share, effect = sum(kept) / len(kept), max(least_effect, design_effect(kept))
    z, size = strictness * (_Z_99 if effect <= 1 else _STUDENT_99), len(kept) / effect
    spread = z**2 / size
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / size + spread / (4 * size)) / (1 + spread)
    return share, max(0.0, centre - half), min(1.0, centre + half)


def design_effect(kept: Sequence[bool]) -> float:
    """Return the variance of the means of 20 batches over what it would be for independent values, at least 1.

    Means of batches that follow each other are correlated where the batches are short, which hides a part of the
    variance: (1 + r) / (1 - r) of it, with r corrected by (1 + 3 r) / 20 for what few batches hide of it.
    """
    each, share = len(kept) // _BATCHES, sum(kept) / len(kept)
    if each < 2 or share in (0.0, 1.0):
        return 1.0
    means = [sum(kept[start : start + each]) / each for start in range(0, each * _BATCHES, each)]
    centre = sum(means) / _BATCHES
    squares = sum((mean - centre) ** 2 for mean in means)
    if not squares:
        return 1.0
    products = sum((one - centre) * (other - centre) for one, other in zip(means, means[1:], strict=False))
    correlation = products / squares
    correlation = min(max(correlation + (1 + 3 * correlation) / _BATCHES, 0.0), _LARGEST_CORRELATION)
    inflation = (1 + correlation) / (1 - correlation) if products > 0 else 1.0
    return max(1.0, squares / (_BATCHES - 1) * each / (share * (1 - share)) * inflation)


def _judge_limit(name: str, times_ms: Sequence[float], limit_ms: float, wanted: float, strictness: float) -> Judgement:
    if not times_ms:
        return Judgement(UNDECIDED, name)
    kept = [time_ms <= limit_ms for time_ms in times_ms]
    slow_ms = sorted(times_ms)[-max(1, round(_SLOWEST * len(times_ms)))]
    slowest_effect = design_effect([time_ms < slow_ms for time_ms in times_ms]) if slow_ms <= limit_ms else 1.0
    _, low, high = share_interval(kept, slowest_effect, strictness)
    verdict = HOLDS if low >= wanted else EXCEEDED if high < wanted else UNDECIDED
    return Judgement(verdict, name, *share_interval(kept, slowest_effect))
