"""Run many command lines of a program cheaply: what takes time to import is imported once, and each one is a fork.

``python command_line_server.py`` reads lines of JSON, ``{"argv": [...], "cwd": ..., "limit_s": ...}``, and answers each
with what a shell would see: exit status (minus the signal where it was killed), output and errors.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Ended:
    """How a command line ended; ``cpu_s`` is the time it computed, whatever else the machine does."""

    status: int
    out: str
    err: str
    cpu_s: float


class CommandLines:
    """``main.py`` behind a fork server."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("NGC_", "SLURM_"))}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, *argv: str, cwd: Path, limit_s: float = 60) -> Ended:
        """Run ``python main.py ARGV``; one that takes longer is killed (status -9)."""
        assert self._process.stdin and self._process.stdout
        asked = {"argv": [os.fsencode(text).hex() for text in argv], "cwd": str(cwd), "limit_s": limit_s}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(240)


def serve() -> None:
    """Answer until the input ends."""
    sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    import launcher.config.nemo_keys
    import launcher.submit.interactive
    import launcher.submit.slurm
    import launcher.sweep  # noqa: F401
    from launcher.config.schema import register
    from support.runs.composed import FIVE, compose, plans_of

    # What a plan imports, and what Hydra's parsers learn from the first words that they read, is half of a command.
    checkpoint = PROJECT / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"
    register()
    plans_of(compose([FIVE, f"export.model.checkpoint_path={checkpoint}"], "interactive"))
    gc.collect()
    gc.freeze()  # or each fork would look through all of it, and copy the pages
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_run(**json.loads(line))) + "\n")
        sys.stdout.flush()


def _run(argv: list[str], cwd: str, limit_s: float) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if (pid := os.fork()) == 0:
            _become([os.fsdecode(bytes.fromhex(text)) for text in argv], cwd, limit_s, out.fileno(), err.fileno())
        _, status, used = os.wait4(pid, 0)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return {
        "status": os.waitstatus_to_exitcode(status),
        "out": texts[0],
        "err": texts[1],
        "cpu_s": used.ru_utime + used.ru_stime,
    }


def _become(argv: list[str], cwd: str, limit_s: float, out: int, err: int) -> None:
    """Be the program, and end as an interpreter does."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)  # SIGALRM ends a process that has no handler
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(cwd)
    sys.argv = [str(PROJECT / "main.py"), *argv]
    status = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()
