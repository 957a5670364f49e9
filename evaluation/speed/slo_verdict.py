"""Whether a percentile of the requests keeps every limit, with confidence.

For each limit, the share of requests within it is an estimate with a 99% interval (Wilson's, of as many independent
requests as the spread between batches of consecutive requests shows: requests that queue behind each other are no
independent ones). The limit holds if the whole interval is at least the percentile, it is exceeded if the whole
interval is below, and undecided otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from evaluation.speed.figures import BY_NAME
from evaluation.speed.record import RequestRecord

HOLDS, EXCEEDED, UNDECIDED = "holds", "exceeded", "undecided"
BACKLOG = "backlog"
"""What takes the place of a limit's name where every limit is kept and answers do not keep up with arrivals."""
_Z_99 = 2.5758
_BATCHES = 20
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
        self._kept: list[tuple[int, tuple[bool, ...]]] = []

    @property
    def count(self) -> int:
        """Number of requests that were judged."""
        return len(self._kept)

    def add(self, records: Iterable[RequestRecord]) -> None:
        """Take requests that ended; one that failed exceeds every limit, one that was cancelled does not count."""
        for record in records:
            if not record.is_cancelled:
                within = tuple(is_within(record, name, limit_ms) for name, limit_ms in self._slos.items())
                self._kept.append((record.scheduled_ns, within))

    def judgement(self) -> Judgement:
        """Judge all requests so far, in the order in which they were due."""
        self._kept.sort()
        columns = zip(*(within for _, within in self._kept), strict=True) if self._kept else [()] * len(self._slos)
        judged = [_judge_limit(name, kept, self._wanted) for name, kept in zip(self._slos, columns, strict=True)]
        worst = min(judged, key=lambda judgement: judgement.share if judgement.share is not None else -1.0)
        verdicts = {judgement.verdict for judgement in judged}
        verdict = EXCEEDED if EXCEEDED in verdicts else UNDECIDED if UNDECIDED in verdicts else HOLDS
        return Judgement(verdict, worst.limit, worst.share, worst.low, worst.high)


def is_within(record: RequestRecord, name: str, limit_ms: float) -> bool:
    """Whether a request of an open loop succeeded within a limit; one without such a duration does with one token."""
    if record.error:
        return False
    if not record.is_of_schedule:  # as earlier versions recorded it
        record = replace(record, is_of_schedule=True)
    values = BY_NAME[name].values_ms([record])
    if not values:
        return name in ("tpot", "itl") and record.output_tokens == 1
    return max(values) <= limit_ms


def fewest_requests(percentile: float) -> int:
    """Return the number of requests below which a rate cannot hold with confidence, even if all keep the limits."""
    return max(_FEWEST_REQUESTS, math.ceil(_Z_99**2 * percentile / (100 - percentile)))


def share_interval(kept: Sequence[bool]) -> tuple[float, float, float]:
    """Return the share of True and its 99% interval; the values are in the order of time and may be correlated.

    The number of values is divided by the design effect: the variance of the means of batches over what it would be
    for independent values (at least 1).
    """
    share = sum(kept) / len(kept)
    size = len(kept) / max(1.0, _design_effect(kept, share))
    spread = _Z_99**2 / size
    centre = (share + spread / 2) / (1 + spread)
    half = _Z_99 * math.sqrt(share * (1 - share) / size + spread / (4 * size)) / (1 + spread)
    return share, max(0.0, centre - half), min(1.0, centre + half)


def _design_effect(kept: Sequence[bool], share: float) -> float:
    each = len(kept) // _BATCHES
    if each < 2 or share in (0.0, 1.0):
        return 1.0
    means = [sum(kept[start : start + each]) / each for start in range(0, each * _BATCHES, each)]
    centre = sum(means) / _BATCHES
    variance = sum((mean - centre) ** 2 for mean in means) / (_BATCHES - 1)
    return variance * each / (share * (1 - share))


def _judge_limit(name: str, kept: Sequence[bool], wanted: float) -> Judgement:
    if not kept:
        return Judgement(UNDECIDED, name)
    share, low, high = share_interval(kept)
    verdict = HOLDS if low >= wanted else EXCEEDED if high < wanted else UNDECIDED
    return Judgement(verdict, name, share, low, high)
