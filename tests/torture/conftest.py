"""Campaigns of faults and hostile input: a small share by default, all of it with ``--campaign full``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from watched import Pipeline, pipeline_over

_CAMPAIGN = "campaign"


@dataclass
class Tally:
    """What a campaign tried and how often the product held; printed at the end of the run.

    Attributes:
        name: of the campaign, as ``docs/reliability.md`` has it.
        tried: trials so far.
        failures: one line for each trial in which the product did not hold.
    """

    name: str
    tried: int = 0
    failures: list[str] = field(default_factory=list)

    def record(self, failure: str | None = None) -> None:
        """Count one trial; ``failure`` says what went wrong in it, None that the product held."""
        self.tried += 1
        if failure:
            self.failures.append(failure)

    def check(self) -> None:
        """Fail the test if any trial failed, or if nothing was tried."""
        assert self.tried, f"{self.name}: nothing was tried"
        assert not self.failures, f"{len(self.failures)} of {self.tried} failed:\n" + "\n".join(self.failures[:20])


@dataclass(frozen=True)
class Campaign:
    """How large this run's campaigns are."""

    is_full: bool

    def trials(self, small: int, full: int) -> int:
        """Number of trials: ``small`` in the test suite, ``full`` in ``make torture``."""
        return full if self.is_full else small


@pytest.fixture
def campaign(request: pytest.FixtureRequest) -> Campaign:
    return Campaign(is_full=request.config.getoption("--campaign") == "full")


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """One campaign's count, named after its test."""
    counted = Tally(request.node.name.removeprefix("test_").replace("_", " "))
    yield counted
    held = counted.tried - len(counted.failures)
    request.node.user_properties.append((_CAMPAIGN, f"{counted.name}: {counted.tried} tried, {held} held"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print every count, whichever worker has counted it."""
    ends = terminalreporter.stats.get("", [])  # reports of setting up and tearing down; the latter know the count
    for name, text in (each for report in ends if report.when == "teardown" for each in report.user_properties):
        if name == _CAMPAIGN:
            terminalreporter.write_line(f"campaign: {text}")


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder on a file system in memory, where there is one: there the disk is not what a campaign waits for."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None, prefix="torture-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def pipeline(memory: Path) -> Iterator[Pipeline]:
    """The five stages over an empty directory, with a tiny checkpoint to convert."""
    from support.nemo_archive import write_gpt  # it imports torch

    with pipeline_over(memory, write_gpt(memory / "gpt.nemo")) as pipeline:
        yield pipeline
