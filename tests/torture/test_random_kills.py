"""Kills at random moments: whatever is hit, nothing looks finished that is not, and the same command ends well."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.torture.five_stages import FIVE, TWO, Run, ended, family, rerun_problem, whole

if TYPE_CHECKING:
    from support.torture.campaign import Campaign, Tally

HOW = ("main", "group", "one", "everything", "SIGTERM", "SIGINT")
TRIALS = 200


def strike(process: subprocess.Popen[str], how: str, chance: random.Random) -> None:
    """End what runs, in one of the ways in which programs end."""
    members = family(process.pid)
    if how in ("SIGTERM", "SIGINT"):
        process.send_signal(signal.Signals[how])
    elif how == "group":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        chosen = {"main": [process.pid], "one": [chance.choice(members)], "everything": members[::-1]}[how]
        for pid in chosen:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.mark.timeout(0)
def test_random_kills(campaign: Campaign, tally: Tally, tmp_path: Path) -> None:
    stages = FIVE if campaign.is_full else TWO
    undisturbed = whole(stages)
    expected = undisturbed.figures(), undisturbed.shards()
    for number in range(campaign.trials(1, TRIALS)):
        tally.record(trial(Run(tmp_path / str(number), stages), number, undisturbed.duration_s, expected))
    tally.check()


def trial(run: Run, number: int, duration_s: float, expected: tuple[dict[str, float], dict[str, str]]) -> str | None:
    """Kill once, look, run again; returns what did not hold."""
    chance = random.Random(number)
    how, after_s = HOW[number % len(HOW)], chance.uniform(0.02, 1.0) * duration_s
    process = run.start()
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        strike(process, how, chance)
    _, output = ended(process)
    what = f"trial {number}, {how} after {after_s:.1f} s"
    # Where everything died at once, shared memory stays until the next start, which sweeps it.
    left = run.residue() if how != "everything" else [line for line in run.residue(20) if line[0].isdigit()]
    problems = [f"left {left}"] if left else []
    problems += [f"looks finished: {run.damages()}"] if run.damages() else []
    problems += [f"a traceback: {output[-800:]}"] if "Traceback" in output else []
    sweeping = ("force=[benchmark]",) if how == "everything" else ()  # starts a server, also where all was done
    problems += filter(None, [rerun_problem(run, *expected, *sweeping)])
    shutil.rmtree(run.root)
    return f"{what}: {'; '.join(problems)}" if problems else None
