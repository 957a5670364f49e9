"""Campaigns of faults and hostile input: a small share by default, more with ``--campaign hour``, all with ``full``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.torture.campaign import Campaign, Tally
from support.torture.watched import Pipeline, pipeline_over

_CAMPAIGN = "campaign"


@pytest.fixture
def campaign(request: pytest.FixtureRequest) -> Campaign:
    return Campaign(request.config.getoption("--campaign"))


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """One campaign's count, named after its test."""
    counted = Tally(request.node.name.removeprefix("test_").replace("_", " "))
    yield counted
    held = counted.tried - len(counted.failures)
    remarks = f"; {counted.remarks}" if counted.remarks else ""
    request.node.user_properties.append((_CAMPAIGN, f"{counted.name}: {counted.tried} tried, {held} held{remarks}"))


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
    from support.checkpoints.nemo_archive import write_gpt  # it imports torch

    with pipeline_over(memory, write_gpt(memory / "gpt.nemo")) as pipeline:
        yield pipeline
