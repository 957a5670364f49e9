"""Slurm's notations of a time limit, as the manual of sbatch lists them under --time."""

from __future__ import annotations

import math

import pytest

from handover.errors import ConfigError
from launcher.plan.time_limit import limit_s, total


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30 * 60),
        ("1:30", 90),
        ("0:01:00", 60),
        ("2:00:00", 7200),
        ("1-12", 36 * 3600),
        ("1-12:30", 36 * 3600 + 30 * 60),
        ("2-00:00:01", 2 * 86400 + 1),
        ("0", math.inf),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
    ],
)
def test_notations(text: str, seconds: float) -> None:
    assert limit_s(text) == seconds


@pytest.mark.parametrize("text", ["", "abc", "1:2:3:4", "-1", "1-", "2h", "1.5"])
def test_what_is_no_time_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a time limit"):
        limit_s(text)


@pytest.mark.parametrize(
    ("limits", "sum_"),
    [
        (["90"], "90"),
        (["1:00:00", "3:00:00", "3:00:00"], "7:00:00"),
        (["0:01:00", "0:01:30"], "0:02:30"),
        (["12:00:00", "1-12"], "2-0:00:00"),
        (["1:00:00", "0"], "UNLIMITED"),
    ],
)
def test_the_stages_of_a_job_have_their_limits_together(limits: list[str], sum_: str) -> None:
    assert total(limits) == sum_
