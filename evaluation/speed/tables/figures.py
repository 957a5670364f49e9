"""Every figure of a measured point, declared once: its name with the unit, and its formula.

A figure that cannot be computed is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from evaluation.speed.tables import formulas
from evaluation.speed.tables.record import RequestRecord, Window, join

PERCENTILES = (50, 90, 95, 99)
STATISTICS = ("mean", *(f"p{percent}" for percent in PERCENTILES))


@dataclass(frozen=True)
class Distribution:
    """A duration of each request, or of each pair of consecutive answers; reported as mean and percentiles.

    Attributes:
        name: short name, used in columns.
        title: name for people.
        formula: definition of one value.
        values_ns: computes the values of one successful request in nanoseconds; empty where it has none.
    """

    name: str
    title: str
    formula: str
    values_ns: Callable[[RequestRecord], Sequence[int | float]]

    def columns(self) -> list[str]:
        """Names of its columns, in milliseconds."""
        return [f"{self.name}_{statistic}_ms" for statistic in STATISTICS]

    def values_ms(self, records: Iterable[RequestRecord]) -> list[float]:
        """All values of the successful requests, pooled."""
        return [
            value / formulas.NANOSECONDS_PER_MS
            for record in records
            if record.is_complete
            for value in self.values_ns(record)
        ]


def _ttft(record: RequestRecord) -> Sequence[int]:
    return (record.chunk_ns[0] - record.began_ns,) if record.is_streamed else ()


def _ttft_from_send(record: RequestRecord) -> Sequence[int]:
    return (record.chunk_ns[0] - record.sent_ns,) if record.is_streamed else ()


def _itl(record: RequestRecord) -> Sequence[int]:
    pairs = zip(record.chunk_ns, record.chunk_ns[1:], strict=False)
    return [later - earlier for earlier, later in pairs] if record.is_streamed else ()


def _tpot(record: RequestRecord) -> Sequence[float]:
    if not record.is_streamed or record.output_tokens < 2:
        return ()
    return ((record.chunk_ns[-1] - record.chunk_ns[0]) / (record.output_tokens - 1),)


DISTRIBUTIONS = (
    Distribution("ttft", "Time to first token", "first token - begin; only where answers are streamed", _ttft),
    Distribution("itl", "Inter-token latency", "gap between consecutive answers of a stream, pooled", _itl),
    Distribution("tpot", "Time per output token", "(e2e - ttft) / (output tokens - 1), one a request", _tpot),
    Distribution("e2e", "End-to-end latency", "last token - begin", lambda record: (record.done_ns - record.began_ns,)),
    Distribution(
        "client_queue",
        "Client queue time",
        "send - when the request was due; part of ttft and e2e of an open loop",
        lambda record: (record.sent_ns - record.scheduled_ns,),
    ),
)
"""A request of an open loop begins when it is due, one of a closed loop when it is sent."""
LATENCIES = ("ttft", "itl", "tpot", "e2e")
"""Names of the distributions that may have a limit."""
FROM_SEND = (
    Distribution("ttft_from_send", "TTFT from the send", "first token - send, whatever the loop", _ttft_from_send),
    Distribution(
        "e2e_from_send",
        "Latency from the send",
        "last token - send, whatever the loop",
        lambda record: (record.done_ns - record.sent_ns,),
    ),
)
"""What a client sees that does not count waits before the send; in columns at the end of the table."""
BY_NAME = {distribution.name: distribution for distribution in DISTRIBUTIONS}


@dataclass(frozen=True)
class FigureContext:
    """Settings that figures depend on beside the requests.

    Attributes:
        slos: limits of a good request in ms, by the name of a distribution.
        gpus: number of GPUs of the deployment, TP x PP; 1 for a deployment on the CPU; None if unknown.
    """

    slos: Mapping[str, float]
    gpus: int | None = 1


@dataclass(frozen=True)
class WindowFigure:
    """A figure of a whole window.

    Attributes:
        name: name of the column, with the unit.
        formula: definition of the figure.
        of: computes the figure; None where it cannot be computed.
    """

    name: str
    formula: str
    of: Callable[[Window, FigureContext], float | None]


def _per_second(count: float, window: Window) -> float | None:
    if not window.succeeded or window.duration_ns <= 0:
        return None
    return count * formulas.NANOSECONDS_PER_S / window.duration_ns


def _output_tokens(window: Window) -> int:
    return sum(record.output_tokens for record in window.succeeded)


def is_good(record: RequestRecord, slos: Mapping[str, float]) -> bool:
    """Return whether a request succeeded within every limit; a duration that it does not have exceeds its limit."""
    if not record.is_complete:
        return False
    for distribution in DISTRIBUTIONS:
        if distribution.name in slos:
            values = distribution.values_ms([record])
            if not values or max(values) > slos[distribution.name]:
                # A single generated token has no TPOT and cannot break a limit on it.
                if not values and distribution.name in ("tpot", "itl") and record.output_tokens == 1:
                    continue
                return False
    return True


def _goodput(window: Window, context: FigureContext) -> float | None:
    if not context.slos or window.duration_ns <= 0 or not window.records:
        return None
    good = sum(is_good(record, context.slos) for record in window.records)
    return good * formulas.NANOSECONDS_PER_S / window.duration_ns


def _tokens_per_user(window: Window, context: FigureContext) -> float | None:
    del context
    return formulas.mean(
        [r.output_tokens * formulas.NANOSECONDS_PER_S / (r.done_ns - r.began_ns) for r in window.succeeded]
    )


SCALARS = (
    WindowFigure("requests_per_s", "successful requests / duration", lambda w, c: _per_second(len(w.succeeded), w)),
    WindowFigure("output_tokens_per_s", "generated tokens / duration", lambda w, c: _per_second(_output_tokens(w), w)),
    WindowFigure(
        "total_tokens_per_s",
        "(given + generated tokens) / duration",
        lambda w, c: _per_second(_output_tokens(w) + sum(r.input_tokens for r in w.succeeded), w),
    ),
    WindowFigure("goodput_requests_per_s", "requests that keep every SLO / duration; empty without SLOs", _goodput),
    WindowFigure(
        "output_tokens_per_s_per_user", "mean over requests of generated tokens / end-to-end latency", _tokens_per_user
    ),
    WindowFigure(
        "output_tokens_per_s_per_gpu",
        "generated tokens / duration / (TP x PP), or / 1 on the CPU",
        lambda w, c: None if not c.gpus or (rate := _per_second(_output_tokens(w), w)) is None else rate / c.gpus,
    ),
)
INTERVALS = ("output_tokens_per_s", "e2e_mean_ms")
"""Figures with a 95% confidence interval over the repeats, in columns of ``ci95_<name>``."""

FIGURE_COLUMNS = (
    *(scalar.name for scalar in SCALARS),
    *(column for distribution in DISTRIBUTIONS for column in distribution.columns()),
    *(f"ci95_{name}" for name in INTERVALS),
)


NEWER_SCALARS = (
    WindowFigure(
        "offered_requests_per_s",
        "requests that became due / duration: what the arrivals of an open loop came to; request_rate_per_s is nominal",
        lambda w, c: None if w.arrivals is None or w.duration_ns <= 0 else w.arrivals * 1e9 / w.duration_ns,
    ),
    WindowFigure(
        "backlog_at_end",
        "requests or conversations that were due and had not ended at the end of the last repeat",
        lambda w, c: None if w.backlog is None else float(w.backlog),
    ),
    WindowFigure(
        "client_lag_p99_ms",
        "99th percentile of what the client's own work delayed sends by, without waits for room in flight",
        lambda w, c: formulas.percentile([r.lag_ns / formulas.NANOSECONDS_PER_MS for r in w.records], 99),
    ),
)
FURTHER_STATISTICS = {"min": 0, "p25": 25, "p75": 75, "max": 100}
"""Percentiles of LATENCIES in columns at the end of the table."""
NEWER_FIGURES = (
    *(scalar.name for scalar in NEWER_SCALARS),
    *(f"{name}_{statistic}_ms" for name in LATENCIES for statistic in FURTHER_STATISTICS),
    *(column for distribution in FROM_SEND for column in distribution.columns()),
)


def compute_figures(windows: Sequence[Window], context: FigureContext) -> dict[str, float | None]:
    """Compute FIGURE_COLUMNS of a point from its repeats: distributions pooled, intervals between repeats."""
    whole = join(windows)
    figures = {scalar.name: scalar.of(whole, context) for scalar in SCALARS}
    for distribution in DISTRIBUTIONS:
        figures |= _statistics(distribution, whole)
    for name in INTERVALS:
        repeats = [value for window in windows if (value := repeat_value(name, window, context)) is not None]
        figures[f"ci95_{name}"] = formulas.half_width(repeats)
    return figures


def compute_newer_figures(windows: Sequence[Window], context: FigureContext) -> dict[str, float | None]:
    """Compute NEWER_FIGURES of a load's point."""
    whole = join(windows)
    figures = {scalar.name: scalar.of(whole, context) for scalar in NEWER_SCALARS}
    for name in LATENCIES:
        values = BY_NAME[name].values_ms(whole.records)
        figures |= {f"{name}_{key}_ms": formulas.percentile(values, part) for key, part in FURTHER_STATISTICS.items()}
    for distribution in FROM_SEND:
        figures |= _statistics(distribution, whole)
    return figures


def _statistics(distribution: Distribution, window: Window) -> dict[str, float | None]:
    values = distribution.values_ms(window.records)
    shown = [formulas.mean(values), *(formulas.percentile(values, percent) for percent in PERCENTILES)]
    return dict(zip(distribution.columns(), shown, strict=True))


def compute_static_figures(windows: Sequence[Window], batch_size: int, gpus: int | None) -> dict[str, float | None]:
    """Compute a static point's figures from its repeats, each a request of ``batch_size`` sequences."""
    figures = compute_figures(windows, FigureContext({}, gpus))
    requests_per_s = figures["requests_per_s"]
    return {**figures, "sequences_per_s": None if requests_per_s is None else batch_size * requests_per_s}


def repeat_value(name: str, window: Window, context: FigureContext) -> float | None:
    """Value of one of INTERVALS in one repeat."""
    if name == "e2e_mean_ms":
        return formulas.mean(BY_NAME["e2e"].values_ms(window.records))
    return next(scalar for scalar in SCALARS if scalar.name == name).of(window, context)


def is_stable(windows: Sequence[Window], context: FigureContext, within: float) -> bool:
    """Whether the repeats agree: both intervals are at most ``within`` of their means to either side."""
    for name in INTERVALS:
        values = [value for window in windows if (value := repeat_value(name, window, context)) is not None]
        centre, width = formulas.mean(values), formulas.half_width(values)
        if not centre or width is None or not math.isfinite(width) or width > within * centre:
            return False
    return True
