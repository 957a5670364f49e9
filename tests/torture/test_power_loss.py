"""After a power loss nothing looks finished that is not, and the next run ends well.

The operations of a run are written down and done to a model of a disk; at each of them the power goes, and what was not
synced is lost, zeros, or half there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from support.torture.campaign import Campaign, Tally
from support.torture.power_loss import CONTENTS, NAMES, Disk
from support.torture.watched import Operation, Pipeline, failure_of, tree, unfinished

pytestmark = pytest.mark.timeout(7200)


@dataclass(frozen=True)
class Recorded:
    """A run's operations, the directory before them, and what it leaves where nothing disturbs it."""

    operations: Sequence[Operation]
    before: Path
    whole: Mapping[str, str]


@pytest.fixture(params=[False, True], ids=["fresh", "forced"])
def recorded(request: pytest.FixtureRequest, pipeline: Pipeline, tmp_path: Path) -> Recorded:
    pipeline.reset()
    if request.param:
        pipeline.operations()
    shutil.copytree(pipeline.root, tmp_path / "before")
    pipeline.reset(tmp_path / "before")
    operations = pipeline.operations(request.param)
    pipeline.reset()
    pipeline.operations()
    return Recorded(operations, tmp_path / "before", tree(pipeline.root))


def disk_before(recorded: Recorded, pipeline: Pipeline) -> Disk:
    pipeline.reset(recorded.before)
    return Disk(pipeline.root)


def test_after_a_power_loss_the_next_run_ends_well(
    recorded: Recorded, pipeline: Pipeline, campaign: Campaign, tally: Tally
) -> None:
    """The share of the test suite: just after each rename that publishes an artefact."""
    disk = disk_before(recorded, pipeline)
    for number, operation in enumerate(recorded.operations, 1):
        disk.do(operation)
        publishes = operation.kind == "rename" and operation.paths[0].endswith(".partial")
        if campaign.is_full or publishes:
            lose_power(disk, number, recorded, pipeline, tally, ways=2 if campaign.is_full else 1)
    tally.check()


def lose_power(disk: Disk, number: int, recorded: Recorded, pipeline: Pipeline, tally: Tally, ways: int) -> None:
    """Lose the power after that many operations: first with all names on the disk, but not what was written."""
    rng = Random(number)
    place = " ".join(recorded.operations[number - 1].sort)
    for names, contents in [("all", CONTENTS[number % 2]), (NAMES[1 + number % 2], rng.choice(CONTENTS))][:ways]:
        pipeline.reset()
        disk.lose_power(names, contents, rng)
        failure = failure_of(pipeline, recorded.whole, force=number % 2 == 0)
        what = f"{number} operations, up to {place}; names {names}, contents {contents}"
        tally.record(f"{what}: {failure}" if failure else None)


def test_the_model_sees_what_was_not_synced(recorded: Recorded, pipeline: Pipeline) -> None:
    """The same run, had it synced no file: what looks finished then has other bytes, or is no manifest at all."""
    disk = disk_before(recorded, pipeline)
    for operation in recorded.operations:
        if operation.kind != "fsync" or Path(operation.paths[0]).suffix in ("", ".partial"):  # directories
            disk.do(operation)
    pipeline.reset()
    disk.lose_power("all", "zeros", Random(0))
    with pytest.raises(json.JSONDecodeError):
        unfinished(pipeline.root)
