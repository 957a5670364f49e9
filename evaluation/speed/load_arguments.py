"""Arguments of the load generator and their check; the login node imports this module: standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from evaluation.arguments import ENDPOINT, BenchmarkArguments
from evaluation.speed.prompts.workload import WORKLOAD_HINT, Workload
from evaluation.speed.tables.figures import LATENCIES
from evaluation.speed.tables.slo_verdict import fewest_requests
from handover.arguments import ScriptArguments, option, same
from handover.errors import ConfigError, nearest
from handover.ranges import (
    DAY_MS,
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
    check_ranges,
)

ARRIVALS = ("poisson", "constant")


@dataclass(frozen=True)
class LoadArguments(ScriptArguments):
    """Put a running deployment under load, point by point."""

    endpoint: str = field(metadata=ENDPOINT)
    output: Path = field(metadata={"help": "directory for load.csv, summary.json and a directory a point"})
    model: str = option("fastertransformer", "model to ask; takes token ids, or text")
    lengths: tuple[str, ...] = option(
        (), f"JSON list of workloads; {WORKLOAD_HINT}; 60/20 (or what the model holds) if empty"
    )
    prompt_file: Path | None = option(
        None, "JSON lines with ids, texts or ShareGPT conversations; takes the place of lengths"
    )
    trace: Path | None = option(None, "Mooncake's JSON lines: the one point is its replay, without lengths and loads")
    trace_speed: float = option(1.0, "of the trace's time; 2: requests come twice as fast as recorded", SPEED)
    trace_block_size: int = option(512, "tokens of a block that a hash id stands for", TOKENS)
    think_s: float = option(0.0, "mean seconds between turns of a conversation, exponential", DAY_S)
    concurrencies: tuple[int, ...] = option((), "JSON list: closed loop, requests always in flight", IN_FLIGHT)
    request_rates: tuple[float, ...] = option(
        (), "JSON list: open loop, requests per second whatever the server does", RATE
    )
    arrival: str = option("poisson", f"of the open loop: {' or '.join(ARRIVALS)}")
    ramp_s: float = option(0.0, "seconds in which the load grows linearly to its level", DAY_S)
    streaming: bool | None = option(None, "whether answers must be streamed; by default what the model does")
    warmup: int = option(0, "answers that do not count; 0: as many as are in flight, twice", UNCOUNTED)
    requests: int = option(0, "answers a repeat; 0: 20, or four times those in flight", UNCOUNTED)
    repeat_s: float = option(
        10.0, "open loop without a number of requests: seconds that a repeat takes, at most 200 answers long", DAY_S
    )
    min_repeats: int = option(3, "repeats before a point may end early", REPEATS)
    repeats: int = option(10, "repeats at most", REPEATS)
    stable_within: float = option(
        0.05, "a point ends when the 95% intervals of throughput and latency are this narrow, relative", RELATIVE
    )
    cancel_share: float = option(0.0, "share of requests whose client hangs up; of streams only", MOST_SHARE)
    cancel_after: int = option(4, "tokens of the answer after which it hangs up", TOKENS)
    samples: int = option(
        0, "different requests, sent again and again; 0: all are different, 8192 of a search", UNCOUNTED
    )
    remark: str = option("", "stands in every row and in the report")
    search_percentile: float | None = option(
        None, "search for the highest rate at which it keeps every SLO", PERCENTILE
    )
    search_low: float = option(2.0, "lowest rate of the search, requests/s", RATE)
    search_high: float = option(1024.0, "highest rate of the search, requests/s", RATE)
    search_precision: float = option(0.05, "distance of the rates that hold and do not, relative", PRECISION)
    search_duration_s: float = option(60.0, "seconds of measuring before a rate holds", WEEK_S)
    search_max_duration_s: float = option(600.0, "seconds after which a rate stays undecided", WEEK_S)
    max_in_flight: int = option(1024, "open loop: more wait in the client", IN_FLIGHT)
    max_point_s: float = option(300.0, "seconds after which a point ends in any case", WEEK_S)
    slos: tuple[tuple[str, float], ...] = option(
        (), 'JSON list of [name, ms]: "ttft", "tpot", "e2e" of a request that is good', DAY_MS
    )
    seed: int = option(0, "of prompts, lengths and arrivals", SEED)
    vocab_size: int | None = same(BenchmarkArguments, "vocab_size")
    model_digest: str | None = same(BenchmarkArguments, "model_digest")
    model_repository: Path | None = same(BenchmarkArguments, "model_repository")
    timeout_s: float = same(BenchmarkArguments, "timeout_s")
    gpu_hour_price: float | None = same(BenchmarkArguments, "gpu_hour_price")
    gpus: int | None = same(BenchmarkArguments, "gpus")
    label: str | None = same(BenchmarkArguments, "label")
    endpoint_key_env: str | None = same(BenchmarkArguments, "endpoint_key_env")


def check_arguments(arguments: LoadArguments) -> None:
    """Refuse arguments that cannot be measured.

    Raises:
        ConfigError: nothing to measure, a number out of range, or an unknown name.
    """
    is_search = arguments.search_percentile is not None
    if is_search:
        _check_search(arguments)
    if arguments.trace is not None and arguments.prompt_file is not None:
        raise ConfigError("trace and prompt_file are both given", "leave one of them out")
    if arguments.trace is None and not is_search and not arguments.concurrencies and not arguments.request_rates:
        raise ConfigError(
            "a load needs concurrencies or request rates", "give concurrencies=[1,4] or request_rates=[2]"
        )
    check_ranges(arguments)
    if arguments.arrival not in ARRIVALS:
        raise ConfigError(f"arrival={arguments.arrival}", nearest(arguments.arrival, ARRIVALS))
    for text in arguments.lengths:
        Workload.parse(text)
    for name, limit_ms in arguments.slos:
        if name not in LATENCIES:
            raise ConfigError(f"SLO {name}={limit_ms} ms is none", nearest(name, LATENCIES))


def _check_search(arguments: LoadArguments) -> None:
    if not arguments.slos:
        raise ConfigError(
            "a search for the highest rate needs limits", "give benchmark.slos.ttft_ms, tpot_ms, itl_ms or e2e_ms"
        )
    if arguments.trace is not None:
        raise ConfigError("a trace has its own rate, which cannot be searched for", "leave trace or the search out")
    for low, high in (("search_low", "search_high"), ("search_duration_s", "search_max_duration_s")):
        if getattr(arguments, low) > getattr(arguments, high):
            raise ConfigError(
                f"{low} {getattr(arguments, low):g} is above {high} {getattr(arguments, high):g}", "swap them"
            )
    percentile, longest_s = arguments.search_percentile or 0.0, arguments.search_max_duration_s
    if arguments.search_low * longest_s < (fewest := fewest_requests(percentile)):
        raise ConfigError(
            f"{arguments.search_low:g} requests/s for search_max_duration_s {longest_s:g} are fewer than the {fewest} "
            f"requests that a verdict on the {percentile:g}th percentile takes",
            f"give search_low {fewest / longest_s:.3g} or more, or a longer search_max_duration_s",
        )
