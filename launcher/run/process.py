"""Child processes of the runner: what they print goes to the terminal and a log, and they never outlive us.

Standard library only.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from handover.parent import end_with_parent
from handover.reasons import names_error
from launcher.run import console

PROJECT_DIR = Path(__file__).resolve().parents[2]
_MOST_ERRORS = 10
_TAIL_LINES = 30  # a server's error and the 15 lines of its log that it quotes


class Child:
    """A running command in a session of its own.

    Args:
        argv: program and arguments.
        env: variables added to ours.
        log: file that everything printed is appended to.
        stop_signals: what asks it to end, each more urgent than the one before; the first is also sent when we die.
        quiet: keep what it prints off the terminal.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        stop_signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        quiet: bool = False,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("ab", buffering=0)  # before anything is started
        terminal = {"SLIPWAY_TERMINAL": "1"} if sys.stderr.isatty() else {}
        self._process = subprocess.Popen(
            argv,
            cwd=PROJECT_DIR,
            env={**os.environ, **terminal, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=functools.partial(end_with_parent, stop_signals[0]),
        )
        self.pid = self._process.pid
        self._stop_signals = tuple(stop_signals)
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._errors: list[str] = []
        self._log_lock = threading.Lock()
        self._unwritable: set[str] = set()
        assert self._process.stdout and self._process.stderr
        pairs = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self._copiers = [
            threading.Thread(target=self._copy, args=(pipe, None if quiet else shown), daemon=True)
            for pipe, shown in pairs
        ]
        for copier in self._copiers:
            copier.start()

    def _copy(self, pipe: IO[bytes], shown: IO[str] | None) -> None:
        """Pass bytes on as they come; the log gets whole lines, without what a progress bar overwrote.

        The pipe is read to its end whatever becomes of what was read: a child whose pipe is full stops.
        """
        line = b""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a chunk may end within a character
        while chunk := os.read(pipe.fileno(), 65536):
            if shown:
                with self._said_once("the terminal"):
                    shown.write(decoder.decode(chunk))
                    shown.flush()
            *whole, line = (line + chunk).split(b"\n")
            self._write_log(whole)
        if line:
            self._write_log([line])

    def _write_log(self, lines: Sequence[bytes]) -> None:
        texts = [
            raw.rstrip(b"\r").rsplit(b"\r", 1)[-1].replace(b"\x1b[K", b"").decode(errors="replace") for raw in lines
        ]
        with self._log_lock:
            printed = [text.rstrip() for text in texts if text.strip()]
            self._tail.extend(printed)
            self._errors = [*self._errors, *filter(names_error, printed)][:_MOST_ERRORS]
            with self._said_once(str(self._log.name)):
                self._log.write("".join(f"{text}\n" for text in texts).encode())

    @contextlib.contextmanager
    def _said_once(self, where: str) -> Iterator[None]:
        """Report the first time that something cannot be written; the next is tried again, for space may come free."""
        try:
            yield
        except (OSError, ValueError) as error:  # a closed stream raises the latter
            if where not in self._unwritable:
                self._unwritable.add(where)
                with contextlib.suppress(OSError, ValueError):
                    console.say_error(f"cannot write to {where}: {error}; what is running goes on")

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Exit status, or None if it still runs after that long."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        for copier in self._copiers:
            copier.join(timeout=2)
        return status

    def stop(self, grace_s: float, whole_group: bool = True) -> int:
        """End it: its stop signals, a grace period after each, SIGKILL to its session. Returns the exit status."""
        for number in self._stop_signals:
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if whole_group else os.kill)(self.pid, number)
                self.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        status = self.wait(5)
        return -signal.SIGKILL if status is None else status

    @property
    def last_lines(self) -> str:
        """The last lines that it printed, after the errors that it named before them."""
        tail = list(self._tail)
        return "\n".join([*(line for line in self._errors if line not in tail), *tail])


def run_quietly(argv: Sequence[str], timeout_s: float) -> None:
    """Run what may fail without harm, and do not wait for ever."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=timeout_s)


def indented(lines: str) -> str:
    """Lines as an error quotes them; ``handover.reasons`` reads them again."""
    return "\n".join(f"    {line}" for line in lines.splitlines())


def describe_status(status: int) -> str:
    """Return what an exit status means."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    if status - 128 in set(signal.Signals):  # what a shell and srun make of it
        return f"exit status {status}, killed by {signal.Signals(status - 128).name}"
    return f"exit status {status}"
