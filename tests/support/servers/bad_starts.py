"""A repository whose tokenizer's model fails its own process in the first starts of a server."""

from __future__ import annotations

from pathlib import Path

EDITED = "preprocessing/1/model.py"
_FUTURE = "from __future__ import annotations\n"
_COUNTED = """
import os, pathlib, signal, subprocess
with pathlib.Path({starts!r}).open("a+") as stream:
    stream.write("x")
    stream.flush()
    stream.seek(0)
    is_bad = len(stream.read()) <= {count}
"""
_SIGNAL = "if is_bad: os.kill(os.getpid(), signal.{number})\n"
_STANDSTILL = """
def initialize(self, args, initialize=TritonPythonModel.initialize):
    if is_bad:
        subprocess.Popen(["/bin/sh", "-c", f"/bin/sleep 2.2; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    initialize(self, args)
TritonPythonModel.initialize = initialize
"""


def end_in_first_starts(repository: Path, starts: Path, count: int, number: str = "SIGBUS") -> None:
    """Have the model send its process a signal when it is imported; ``starts`` gets a letter for each start."""
    model = repository / EDITED
    first, future, rest = model.read_text().partition(_FUTURE)
    counted = _COUNTED.format(starts=str(starts), count=count)
    model.write_text(first + future + counted + _SIGNAL.format(number=number) + rest)


def stand_still_in_first_start(repository: Path, starts: Path) -> None:
    """Have the model stand still for two seconds when it is initialized, as where its process gets no core."""
    model = repository / EDITED
    first, future, rest = model.read_text().partition(_FUTURE)
    model.write_text(first + future + _COUNTED.format(starts=str(starts), count=1) + rest + _STANDSTILL)
