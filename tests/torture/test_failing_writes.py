"""A disk that is full, over quota or ill, at each stage: one clear error, and the same command continues."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.torture.five_stages import FIVE, TWO, Run, rerun_problem, whole

if TYPE_CHECKING:
    from support.torture.campaign import Campaign, Tally

SOURCE = Path(__file__).with_name("failing_writes.c")
WITHOUT_SERVER = ("main.py", "export_scripts.convert", "export_scripts.export")
WITH_SERVER = ("deployment.serve", "evaluation.lambada", "evaluation.benchmark", "evaluation.report")
CALLS = {
    "write": (errno.ENOSPC, errno.EDQUOT, errno.EIO),
    "create": (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES),
    "mkdir": (errno.ENOSPC, errno.EIO),
    "rename": (errno.EIO, errno.EXDEV, errno.EPERM),
    "link": (errno.EIO, errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSPC),
    "fsync": (errno.EIO, errno.ENOSPC),
}
CASES = [
    (program, call, number)
    for (call, numbers), program in itertools.product(CALLS.items(), (*WITHOUT_SERVER, *WITH_SERVER))
    for number in numbers
    if call != "link" or program == "export_scripts.export"
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("preloaded") / "failing_writes.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", built, SOURCE, "-ldl"], check=True)
    return built


@pytest.mark.timeout(0)
def test_failing_writes(campaign: Campaign, tally: Tally, tmp_path: Path, library: Path) -> None:
    chance = random.Random(7)
    small = [("export_scripts.convert", "write", errno.EDQUOT)]
    for number, case in enumerate(CASES if campaign.is_full else small):
        after = chance.choice((0, 1, 3, 10, 30)) * (1000 if case[1] == "write" else 1)
        run = Run(tmp_path / str(number), TWO if case[0] in WITHOUT_SERVER else FIVE)
        tally.record(trial(run, library, *case, after=after if campaign.is_full else 3000))
    tally.check()


def trial(run: Run, library: Path, program: str, call: str, number: int, after: int) -> str | None:
    """Run once with the fault, look, and once without; returns what did not hold."""
    run.environment.update(
        LD_PRELOAD=str(library),
        FAILING_ROOT=str(run.base),
        FAILING_PROGRAM=program,
        FAILING_CALL=call,
        FAILING_AFTER=str(after),
        FAILING_ERRNO=str(number),
    )
    status, output = run.run()
    run.environment.clear()
    logs = "".join(path.read_text(errors="replace") for path in run.base.rglob("*.log"))
    problems = [f"status {status}: {output[-600:]}"] if status not in (0, 1) else []
    problems += [f"a traceback: {output[-1200:]}"] if "Traceback" in output + logs else []
    problems += (
        [f"failed without a reason: {output[-600:]}"] if status and os.strerror(number) not in output + logs else []
    )
    problems += [f"looks finished: {run.damages()}"] if run.damages() else []
    problems += [f"left {left}"] if (left := run.residue()) else []
    expected = whole(run.stages)
    problems += filter(None, [rerun_problem(run, expected.figures(), expected.shards())])
    shutil.rmtree(run.root)
    what = f"{program}: {call} fails with {errno.errorcode[number]} after {after}"
    return f"{what}: {'; '.join(problems)}" if problems else None
