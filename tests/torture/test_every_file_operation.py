"""A run that is killed at any of its file operations is finished by the next run, which leaves nothing over.

Convert and export are the real ones, on a tiny model; the launcher's own files are all there. A kill after one
operation and a kill before the next leave the same files, so that each number of operations is tried once; a write is
also cut off in its middle.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.torture.campaign import Campaign, Tally
from support.torture.watched import Operation, Pipeline, differences, failure_of, tree

pytestmark = pytest.mark.timeout(3600)

# What blocked the next run, or stayed for ever, when it was last there; and of each kind of operation one.
WINDOWS = (
    *("create .*partial.lock", "write .*partial.lock", "unlink .*partial.lock"),
    *("mkdir .*partial.tmp", "create .*slipway-work.json.tmp", "rename .*partial.tmp"),
    *("create .*/.manifest.json.tmp", "write .*/.manifest.json.tmp", "rename .*/.manifest.json.tmp"),
    *("write .*/.journal.jsonl", "unlink .*/.journal.jsonl", "create .*/.SHARD.tmp", "rename .*/.SHARD.tmp"),
    *("create .*/.stages.json.tmp", "create .*plan.json.tmp", "link .*", "fsync .*/model_repo.partial"),
    *("rename .*N-gpu.partial ", "rename .*model_repo.partial ", "unlink .*/model_repo/.slipway-work.json"),
)
FORCED_WINDOWS = (
    *("unlink .*/stages.json", "rename .*/N-gpu .*replaced", "rename .*N-gpu.partial "),
    *(
        "create .*/.endpoint.json.tmp",
        "rename .*/model_repo .*replaced",
        "rename .*/report .*",
        "unlink .*/.report.tmp/.*",
    ),
)


@dataclass(frozen=True)
class Runs:
    """The stages, and what they do and leave where nothing disturbs them, from nothing and over a finished run."""

    pipeline: Pipeline
    operations: Mapping[bool, Sequence[Operation]]
    whole: Mapping[str, str]
    finished: Path


@pytest.fixture(scope="module")
def runs(pipeline: Pipeline, memory: Path) -> Runs:
    pipeline.reset()
    fresh = pipeline.operations()
    whole = tree(pipeline.root)
    shutil.copytree(pipeline.root, memory / "finished")
    pipeline.reset(memory / "finished")
    forced = pipeline.operations(force=True)
    assert differences(tree(pipeline.root), whole) == []
    return Runs(pipeline, {False: fresh, True: forced}, whole, memory / "finished")


def first_of(operations: Sequence[Operation], window: str) -> int:
    """Number of operations up to the first of a sort, that one included."""
    return 1 + next(n for n, each in enumerate(operations) if re.match(window, " ".join(each.sort)))


def test_a_run_killed_at_any_file_operation_is_finished_by_the_next(
    runs: Runs, campaign: Campaign, tally: Tally
) -> None:
    trials = {(False, first_of(runs.operations[False], window)) for window in WINDOWS}
    trials |= {(True, first_of(runs.operations[True], window)) for window in FORCED_WINDOWS}
    if campaign.is_full:
        trials = {(force, number) for force, done in runs.operations.items() for number in range(len(done))}
    for force, number in sorted(trials):
        kill_and_run_again(runs, tally, force, number)
    tally.check()


def test_a_run_killed_in_the_middle_of_a_write_is_finished_by_the_next(
    runs: Runs, campaign: Campaign, tally: Tally
) -> None:
    for force, done in runs.operations.items():
        writes = {each.sort: number for number, each in enumerate(done) if each.kind == "write"}
        every = [number for number, each in enumerate(done) if each.kind == "write"]
        chosen = sorted(writes.values())[:: 1 + len(writes) // campaign.trials(3, len(writes))]
        for number in every if campaign.is_full else chosen:
            kill_and_run_again(runs, tally, force, number, is_torn=True)
    tally.check()


def kill_and_run_again(runs: Runs, tally: Tally, force: bool, number: int, is_torn: bool = False) -> None:
    """Kill a run after that many operations, and look at what it left and at what the next run makes of it.

    The next run of a forced one is forced too, or not: there was a finished result before.
    """
    pipeline, operations = runs.pipeline, runs.operations[force]
    pipeline.reset(runs.finished if force else None)
    status = pipeline.run(force, stop_after=number, is_torn=is_torn)
    again = force and number % 2 == 0
    failure = "it was not killed" if status != -9 else failure_of(pipeline, runs.whole, again)
    place = " ".join(operations[number - 1].sort) if number else "the start"
    what = f"{'forced' if force else 'fresh'}, {number} operations, up to {place}{', torn' if is_torn else ''}"
    tally.record(f"{what}: {failure}" if failure else None)
