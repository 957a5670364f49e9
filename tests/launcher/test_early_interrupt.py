"""Ctrl-C before anything has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def test_ctrl_c_while_modules_are_read_ends_quietly(tmp_path: Path) -> None:
    (tmp_path / "hydra.py").write_text("import time\nprint('reading', flush=True)\ntime.sleep(60)\n")  # a slow disk
    process = subprocess.Popen(
        [sys.executable, str(PROJECT / "main.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=180)
    assert (process.returncode, errors) == (-signal.SIGINT, "")
