"""Has grammars tried in a process of their own before this one compiles them; see trial.py."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import EngineError, UnavailableError
from ..request.guides import Guide
from .library import GrammarError
from .trial import MOST_BYTES, MOST_CPU_S

_log = logging.getLogger(__name__)
_PROGRAM = ("-m", "fastertransformer.engine.grammar.trial")
_PACKAGE = str(Path(__file__).resolve().parents[3])
_LOOK_S = 0.05  # between two looks whether the client is still there
_TOO_MUCH = (
    f"it takes more than {MOST_CPU_S:g} s of processor time or {MOST_BYTES >> 20} MiB of memory to compile, or has"
    " longer chains of references than are followed; make it smaller"
)
LATER = "send it again later, or to another server"
_BUSY = "the grammars of other requests are being compiled, and this one's turn has not come"


class GoneError(Exception):
    """The client of a request has gone while its grammar was tried."""


@dataclass(frozen=True)
class Tried:
    """What a trial has found.

    Attributes:
        written: the grammar in the library's form.
        seconds: of processor time that it takes to compile.
        size_bytes: of memory that it takes.
    """

    written: str
    seconds: float
    size_bytes: int


class Trials:
    """The process; any thread may call its methods.

    Args:
        directory: of the shards, with the tokenizer's files.
        vocab_size: of the model.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._arguments = str(directory), str(vocab_size)
        self._lock, self._is_closed = threading.Lock(), False
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the process, if there is none; it takes a second to read 128,000 tokens, and needs no core of these.

        Raises:
            EngineError: it cannot be started, or this is closed.
        """
        with self._lock:
            self._running()

    def _running(self) -> socket.socket:
        """Return the process's socket; under the lock."""
        if self._is_closed:
            raise EngineError("the engine was closed")
        if self._control and self._process and self._process.poll() is None:
            return self._control
        if self._process:
            _log.error("the process that tries grammars has ended with status %s; restarting it", self._process.poll())
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([_PACKAGE, *filter(None, sys.path)])}
        command = [sys.executable, *_PROGRAM, *self._arguments]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, start_new_session=True
                )
            except OSError as error:
                raise EngineError(f"the process that tries grammars cannot be started: {error}") from None
        weakref.finalize(self, _end, self._process)
        return self._control

    def run(self, guide: Guide, is_wanted: Callable[[], bool], until_s: float) -> Tried:
        """Try a grammar.

        Args:
            guide: to compile.
            is_wanted: returns whether the client still waits.
            until_s: of time.monotonic, until which a verdict is waited for.

        Raises:
            GrammarError: it cannot be honoured.
            UnavailableError: others are tried, and its turn has not come.
            GoneError: the client has gone.
            EngineError: the process cannot be started, or has ended.
        """
        with self._lock:
            control, process = self._running(), self._process
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(control, [b"?"], [theirs.fileno()])
            theirs.close()
            ours.settimeout(_LOOK_S)
            verdict = _ask(ours, json.dumps([guide.kind, guide.text]).encode(), is_wanted, until_s)
        return self._read(guide, verdict, process)

    def _read(self, guide: Guide, verdict: bytes, process: subprocess.Popen[bytes] | None) -> Tried:
        try:
            found = json.loads(verdict)
        except ValueError:  # the kernel has ended it, before a word or in the middle of one
            if self._is_closed or process is None or process.poll() is not None:
                raise EngineError("the process that tries grammars has ended") from None
            raise GrammarError(guide.kind, _TOO_MUCH, is_ours=True) from None
        if "reason" in found:
            raise GrammarError(guide.kind, found["reason"], found["is_ours"])
        return Tried(found["written"], found["seconds"], found["bytes"])

    @staticmethod
    def wait_for(other: threading.Event, is_wanted: Callable[[], bool], until_s: float) -> None:
        """Wait for what another thread does; see ``run``."""
        while not other.wait(_LOOK_S):
            _look(is_wanted, until_s)

    def close(self) -> None:
        """End the process, and what it is trying."""
        with self._lock:
            self._is_closed = True
            if self._process:
                _end(self._process)
            if self._control:
                self._control.close()


def _ask(asked: socket.socket, question: bytes, is_wanted: Callable[[], bool], until_s: float) -> bytes:
    """Write a question and read what is answered until the other side ends; see Trials.run."""
    left, parts, is_open = memoryview(question), list[bytes](), True
    while is_open:
        try:
            if left:
                left = left[asked.send(left) :]
                if not left:
                    asked.shutdown(socket.SHUT_WR)
                continue
            parts.append(asked.recv(1 << 18))
            is_open = bool(parts[-1])
        except TimeoutError:
            _look(is_wanted, until_s)
        except (BrokenPipeError, ConnectionResetError):
            is_open = False
    return b"".join(parts)


def _look(is_wanted: Callable[[], bool], until_s: float) -> None:
    """Raise an error if there is no reason to wait any longer; see Trials.run."""
    if not is_wanted():
        raise GoneError
    if time.monotonic() > until_s:
        raise UnavailableError(_BUSY, LATER)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those that it has forked."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
