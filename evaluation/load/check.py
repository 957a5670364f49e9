"""What can be said about a load before it starts; standard library only, the login side asks too."""

from __future__ import annotations

from evaluation.load.arguments import ARRIVALS, LoadArguments
from evaluation.load.figures import DISTRIBUTIONS
from evaluation.load.workload import Workload
from handover.errors import ConfigError, nearest


def check_arguments(arguments: LoadArguments) -> None:
    """Refuse what cannot be measured.

    Raises:
        ConfigError: nothing to measure, a count or rate that is too small, or an unknown name.
    """
    if not arguments.concurrencies and not arguments.request_rates:
        raise ConfigError(
            "a load needs concurrencies or request rates", "give concurrencies=[1,4] or request_rates=[2]"
        )
    least = {"concurrencies": arguments.concurrencies, "repeats": (arguments.repeats,)}
    least |= {"min_repeats": (arguments.min_repeats,), "max_in_flight": (arguments.max_in_flight,)}
    for name, values in least.items():
        if any(value < 1 for value in values):
            raise ConfigError(f"{name} of a load must be at least 1, not {min(values)}")
    if any(rate <= 0 for rate in arguments.request_rates):
        raise ConfigError(f"request rates must be above 0, not {min(arguments.request_rates)}")
    if min(arguments.warmup, arguments.requests, arguments.ramp_s) < 0 or arguments.max_point_s <= 0:
        raise ConfigError("warmup, requests, ramp_s and max_point_s of a load cannot be negative")
    if arguments.arrival not in ARRIVALS:
        raise ConfigError(f"arrival={arguments.arrival}", nearest(arguments.arrival, ARRIVALS))
    for text in arguments.lengths:
        Workload.parse(text)
    known = [distribution.name for distribution in DISTRIBUTIONS]
    for name, limit_ms in arguments.slos:
        if name not in known or limit_ms <= 0:
            raise ConfigError(f"SLO {name}={limit_ms} ms is none", nearest(name, known))
