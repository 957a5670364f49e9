"""The sections of conf/benchmark that describe a serving load."""

from __future__ import annotations

from dataclasses import dataclass, field

from handover.ranges import (
    DAY_S,
    IN_FLIGHT,
    MOST_SHARE,
    PERCENTILE,
    PRECISION,
    RATE,
    RELATIVE,
    REPEATS,
    SEED,
    SPEED,
    TOKENS,
    UNCOUNTED,
    WEEK_S,
    number,
)


@dataclass
class SearchConfig:
    """A search for the highest request rate at which a percentile of the requests keeps every SLO."""

    percentile: float | None = number(None, PERCENTILE)  # None: no search
    low: float = number(2.0, RATE)  # requests per second
    high: float = number(1024.0, RATE)
    precision: float = number(0.05, PRECISION)  # relative
    duration_s: float = number(60.0, WEEK_S)  # of measuring before a rate holds
    max_duration_s: float = number(600.0, WEEK_S)  # after which a rate stays undecided


@dataclass
class LoadConfig:
    """A serving load; the keys are those of ``evaluation.speed.load_arguments``."""

    concurrencies: list[int] = number([], IN_FLIGHT)  # closed loop: requests in flight
    request_rates: list[float] = number([], RATE)  # open loop: requests per second
    arrival: str = "poisson"  # or constant
    ramp_s: float = number(0.0, DAY_S)
    lengths: list[str] = field(default_factory=list)  # workloads, as 60/20, sharegpt or agent:5:200/50
    prompt_file: str | None = None
    trace: str | None = None  # Mooncake's JSON lines
    trace_speed: float = number(1.0, SPEED)
    trace_block_size: int = number(512, TOKENS)
    think_s: float = number(0.0, DAY_S)  # mean, between turns
    streaming: bool | None = None  # None: what the served model does
    warmup: int = number(0, UNCOUNTED)  # answers; 0: twice those in flight
    requests: int = number(0, UNCOUNTED)  # answers a repeat; 0: 20, or four times those in flight
    repeat_s: float = number(10.0, DAY_S)  # open loop, without requests: seconds of a repeat of up to 200 answers
    min_repeats: int = number(3, REPEATS)
    repeats: int = number(10, REPEATS)  # at most
    stable_within: float = number(0.05, RELATIVE)  # relative 95% interval at which a point ends
    max_in_flight: int = number(1024, IN_FLIGHT)
    max_point_s: float = number(300.0, WEEK_S)
    cancel_share: float = number(0.0, MOST_SHARE)  # of requests whose client hangs up
    cancel_after: int = number(4, TOKENS)  # tokens of the answer
    samples: int = number(0, UNCOUNTED)  # different requests; 0: all, a search 8192
    seed: int = number(0, SEED)
    remark: str = ""  # stands in every row and in the report
    search: SearchConfig = field(default_factory=SearchConfig)
