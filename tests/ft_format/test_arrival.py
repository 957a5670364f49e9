"""From when a request's times count: from its arrival on this host, if what passed it on says so credibly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ft_format.arrival import arrival_s

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
OPENED_S = 5000.25


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (f"{BOOT}/4999750000000", 4999.75),
        (f"{BOOT}/5000500000000", OPENED_S),  # later than it came here
        (f"{BOOT}/4000000000000", OPENED_S),  # 1,000 s before
        (f"another/{4999 * 10**9}", OPENED_S),  # another host's clock
        (f"{BOOT}/-1", OPENED_S),
        (f"{BOOT}/soon", OPENED_S),
        (f"{BOOT}/{'9' * 5000}", OPENED_S),
        (BOOT, OPENED_S),
        (17, OPENED_S),
        (None, OPENED_S),
    ],
)
def test_an_arrival_counts_if_it_is_of_this_host_and_before_the_engine_had_the_request(
    given: object, expected: float
) -> None:
    parameters = json.dumps({"slipway_arrival": given, "user": 3})
    assert arrival_s(parameters, OPENED_S) == expected


@pytest.mark.parametrize("parameters", ["", "{}", '{"user": "slipway_arrival"}'])
def test_without_it_a_request_counts_from_where_the_engine_got_it(parameters: str) -> None:
    assert arrival_s(parameters, OPENED_S) == OPENED_S
