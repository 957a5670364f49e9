"""How two processes share out the test suite, tried on a suite of four files under the real one's conftest.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
FILE = "import pytest, time\n@pytest.mark.parametrize('n', range({}))\ndef test_it(n): time.sleep(0.02)\n"
FILES = {"unit/test_a": 15, "unit/test_b": 15, "slurm/test_c": 6, "slurm/test_d": 6}  # and how many tests each has


def test_what_shares_a_cluster_runs_in_one_process_and_first_and_so_does_a_file(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, count in FILES.items():
        file = tmp_path / "tests" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(FILE.format(count))
    shutil.copy(CONFTEST, tmp_path / "tests")
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-v", "--numprocesses=2", "--dist=loadgroup", "tests"]
    printed = subprocess.run(command, cwd=tmp_path, env=mine, capture_output=True, text=True, check=True).stdout
    workers, files = defaultdict(list), defaultdict(list)
    for worker, name in re.findall(r"\[(gw\d)\].* PASSED tests/(\w+/\w+)\.py::", printed):
        workers[name].append(worker)
        files[worker].append(name)
    assert {name: len(ran) for name, ran in workers.items()} == FILES, printed
    assert all(len(set(ran)) == 1 for ran in workers.values()), printed
    assert workers["slurm/test_c"] == workers["slurm/test_d"], printed
    assert workers["slurm/test_c"][0] != workers["unit/test_a"][0], printed
    assert files[workers["slurm/test_c"][0]][0] == "slurm/test_c", printed  # though other files have more tests
