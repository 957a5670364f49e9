"""The same command two or three times at once: one works, the others wait or are refused in words; nothing is mixed."""

from __future__ import annotations

import itertools
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.torture.five_stages import FIVE, TWO, Run, ended, rerun_problem, whole

if TYPE_CHECKING:
    from support.torture.campaign import Campaign, Tally

PLAIN, FORCED = "force=[]", "force=[convert,export]"
TOGETHER = [
    (TWO, (PLAIN, PLAIN)),
    (TWO, (PLAIN, PLAIN, PLAIN)),
    (TWO, (PLAIN, FORCED)),
    (TWO, (FORCED, FORCED, PLAIN)),
    (FIVE, (PLAIN, PLAIN)),
    (FIVE, (PLAIN, FORCED)),
]
APART_S = (0.0, 0.3, 1.0, 4.0)
REFUSALS = ("another run is making", "another deployment", "is running already", "is being served")


@pytest.mark.timeout(0)
def test_two_at_once(campaign: Campaign, tally: Tally, tmp_path: Path) -> None:
    cases = list(itertools.product(TOGETHER, APART_S))
    for number, ((stages, commands), apart_s) in enumerate(cases[: campaign.trials(1, len(cases))]):
        tally.record(trial(Run(tmp_path / str(number), stages), commands, apart_s))
    tally.check()


def trial(run: Run, commands: tuple[str, ...], apart_s: float) -> str | None:
    """Start all, so far apart; returns what did not hold."""
    expected = whole(run.stages)
    processes = []
    for command in commands:
        processes.append(run.start(command))
        time.sleep(apart_s)
    outcomes = [ended(process) for process in processes]
    problems = []
    if not any(status == 0 for status, _ in outcomes):
        problems.append("all failed")
    for status, output in outcomes:
        is_refused = status == 1 and any(words in output for words in REFUSALS)
        if "Traceback" in output or not (status == 0 or is_refused):
            problems.append(f"ended with {status}: {output[-800:]}")
    problems += [f"looks finished: {run.damages()}"] if run.damages() else []
    problems += filter(None, [rerun_problem(run, expected.figures(), expected.shards())])
    shutil.rmtree(run.root)
    what = f"{run.stages} {' and '.join(commands)}, {apart_s} s apart"
    return f"{what}: {'; '.join(problems)}" if problems else None
