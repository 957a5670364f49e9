"""Arguments of the load generator and their check; the login node imports this module: standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from evaluation.speed.figures import LATENCIES
from evaluation.speed.slo_verdict import fewest_requests
from evaluation.speed.workload import WORKLOAD_HINT, Workload
from handover.arguments import ScriptArguments
from handover.errors import ConfigError, nearest
from handover.ranges import (
    COUNT,
    DAY_MS,
    DAY_S,
    IDS,
    IN_FLIGHT,
    MOST_SHARE,
    PERCENTILE,
    PRECISION,
    PRICE,
    RANGE,
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

    endpoint: str = field(metadata={"help": "endpoint.json, its directory, host:port of gRPC, or http://host:port/v1"})
    output: Path = field(metadata={"help": "directory for load.csv, summary.json and a directory a point"})
    model: str = field(
        default="fastertransformer",
        metadata={"help": "model to ask; takes token ids, or text"},
    )
    lengths: tuple[str, ...] = field(
        default=(),
        metadata={"help": f"JSON list of workloads; {WORKLOAD_HINT}; 60/20 (or what the model holds) if empty"},
    )
    prompt_file: Path | None = field(
        default=None,
        metadata={"help": "JSON lines with ids, texts or ShareGPT conversations; takes the place of lengths"},
    )
    trace: Path | None = field(
        default=None,
        metadata={"help": "Mooncake's JSON lines: the one point is its replay, without lengths and loads"},
    )
    trace_speed: float = field(
        default=1.0, metadata={RANGE: SPEED, "help": "of the trace's time; 2: requests come twice as fast as recorded"}
    )
    trace_block_size: int = field(
        default=512, metadata={RANGE: TOKENS, "help": "tokens of a block that a hash id stands for"}
    )
    think_s: float = field(
        default=0.0, metadata={RANGE: DAY_S, "help": "mean seconds between turns of a conversation, exponential"}
    )
    concurrencies: tuple[int, ...] = field(
        default=(), metadata={RANGE: IN_FLIGHT, "help": "JSON list: closed loop, requests always in flight"}
    )
    request_rates: tuple[float, ...] = field(
        default=(), metadata={RANGE: RATE, "help": "JSON list: open loop, requests per second whatever the server does"}
    )
    arrival: str = field(default="poisson", metadata={"help": f"of the open loop: {' or '.join(ARRIVALS)}"})
    ramp_s: float = field(
        default=0.0, metadata={RANGE: DAY_S, "help": "seconds in which the load grows linearly to its level"}
    )
    streaming: bool | None = field(
        default=None, metadata={"help": "whether answers must be streamed; by default what the model does"}
    )
    warmup: int = field(
        default=0, metadata={RANGE: UNCOUNTED, "help": "answers that do not count; 0: as many as are in flight, twice"}
    )
    requests: int = field(
        default=0, metadata={RANGE: UNCOUNTED, "help": "answers a repeat; 0: 20, or four times those in flight"}
    )
    repeat_s: float = field(
        default=10.0,
        metadata={
            RANGE: DAY_S,
            "help": "open loop without a number of requests: seconds that a repeat takes, at most 200 answers long",
        },
    )
    min_repeats: int = field(default=3, metadata={RANGE: REPEATS, "help": "repeats before a point may end early"})
    repeats: int = field(default=10, metadata={RANGE: REPEATS, "help": "repeats at most"})
    stable_within: float = field(
        default=0.05,
        metadata={
            RANGE: RELATIVE,
            "help": "a point ends when the 95% intervals of throughput and latency are this narrow, relative",
        },
    )
    cancel_share: float = field(
        default=0.0, metadata={RANGE: MOST_SHARE, "help": "share of requests whose client hangs up; of streams only"}
    )
    cancel_after: int = field(
        default=4, metadata={RANGE: TOKENS, "help": "tokens of the answer after which it hangs up"}
    )
    samples: int = field(
        default=0,
        metadata={
            RANGE: UNCOUNTED,
            "help": "different requests, sent again and again; 0: all are different, 8192 of a search",
        },
    )
    remark: str = field(default="", metadata={"help": "stands in every row and in the report"})
    search_percentile: float | None = field(
        default=None,
        metadata={RANGE: PERCENTILE, "help": "search for the highest rate at which it keeps every SLO"},
    )
    search_low: float = field(default=2.0, metadata={RANGE: RATE, "help": "lowest rate of the search, requests/s"})
    search_high: float = field(default=1024.0, metadata={RANGE: RATE, "help": "highest rate of the search, requests/s"})
    search_precision: float = field(
        default=0.05, metadata={RANGE: PRECISION, "help": "distance of the rates that hold and do not, relative"}
    )
    search_duration_s: float = field(
        default=60.0, metadata={RANGE: WEEK_S, "help": "seconds of measuring before a rate holds"}
    )
    search_max_duration_s: float = field(
        default=600.0, metadata={RANGE: WEEK_S, "help": "seconds after which a rate stays undecided"}
    )
    max_in_flight: int = field(default=1024, metadata={RANGE: IN_FLIGHT, "help": "open loop: more wait in the client"})
    max_point_s: float = field(
        default=300.0, metadata={RANGE: WEEK_S, "help": "seconds after which a point ends in any case"}
    )
    slos: tuple[tuple[str, float], ...] = field(
        default=(),
        metadata={RANGE: DAY_MS, "help": 'JSON list of [name, ms]: "ttft", "tpot", "e2e" of a request that is good'},
    )
    seed: int = field(default=0, metadata={RANGE: SEED, "help": "of prompts, lengths and arrivals"})
    vocab_size: int | None = field(
        default=None, metadata={RANGE: IDS, "help": "of the random ids; by default the served model's"}
    )
    model_digest: str | None = field(default=None, metadata={"help": "digest of the model that must be served"})
    model_repository: Path | None = field(
        default=None, metadata={"help": "the repository that must be served; its manifest says the digest"}
    )
    timeout_s: float = field(default=600.0, metadata={RANGE: WEEK_S, "help": "limit of one request in seconds"})
    gpu_hour_price: float | None = field(
        default=None, metadata={RANGE: PRICE, "help": "of one GPU, in any currency, for the cost of a million tokens"}
    )
    gpus: int | None = field(
        default=None, metadata={RANGE: COUNT, "help": "GPUs that serve; by default what the deployment says"}
    )
    label: str | None = field(default=None, metadata={"help": "name of the deployment in tables and reports"})
    endpoint_key_env: str | None = field(
        default=None, metadata={"help": "environment variable with the bearer key of an OpenAI API"}
    )


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
