"""What can be said about a load before it starts; standard library only, the login side asks too."""

from __future__ import annotations

from evaluation.speed.load_arguments import ARRIVALS, LoadArguments
from evaluation.speed.load_figures import DISTRIBUTIONS
from evaluation.speed.workload import Workload
from handover.errors import ConfigError, nearest
from handover.ranges import check_ranges


def check_arguments(arguments: LoadArguments) -> None:
    """Refuse what cannot be measured.

    Raises:
        ConfigError: nothing to measure, a number out of range, or an unknown name.
    """
    if not arguments.concurrencies and not arguments.request_rates:
        raise ConfigError(
            "a load needs concurrencies or request rates", "give concurrencies=[1,4] or request_rates=[2]"
        )
    check_ranges(arguments)
    if arguments.arrival not in ARRIVALS:
        raise ConfigError(f"arrival={arguments.arrival}", nearest(arguments.arrival, ARRIVALS))
    for text in arguments.lengths:
        Workload.parse(text)
    known = [distribution.name for distribution in DISTRIBUTIONS]
    for name, limit_ms in arguments.slos:
        if name not in known:
            raise ConfigError(f"SLO {name}={limit_ms} ms is none", nearest(name, known))
