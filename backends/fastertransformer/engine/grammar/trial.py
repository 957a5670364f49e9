"""The process in which grammars are compiled on trial: some take for ever, all memory, or more stack than there is.

``python3 -m fastertransformer.engine.grammar.trial DIRECTORY VOCAB_SIZE``. Its standard input is a Unix socket of
packets; each passes a socket, from which a grammar is read and to which the verdict is written, as JSON. The
process has read the vocabulary, and forks a child for each grammar before it comes. The child takes one packet, and is
killed by the kernel where it exceeds a limit: the verdict is then missing. What the child has compiled cannot be passed
on; the other side compiles it again, knowing what that takes.

All of it ends when the other end of standard input is closed, by whatever ends the process that has it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EngineError
from .library import LARGE_STACK_BYTES, GrammarError, compile_written, limit_of, load_tokenizer, refused, write

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_CPU_S = 1.0  # of processor time; on a clock the other side waits as long as it wants
MOST_BYTES = 64 << 20
STACK_BYTES = LARGE_STACK_BYTES // 16
MOST_TOKEN_S = 0.05  # of processor time for one of the first tokens
_IDLE, _MOST = 2, 8  # children that wait for a grammar, and all of them
_NICE = 5  # steps of the engine go first
_WALK_S, _LEAST_TOKENS, _MOST_TOKENS = 0.01, 4, 24
_PID = struct.Struct("<i")


class Nursery:
    """Keeps some children waiting.

    Args:
        control: where the packets come.
        tokenizer: of the vocabulary.
    """

    def __init__(self, control: socket.socket, tokenizer: LLTokenizer) -> None:
        self._control, self._tokenizer = control, tokenizer
        self._idle, self._busy = set[int](), set[int]()
        self._taken, self._take = os.pipe2(os.O_NONBLOCK)  # a child's number, when it has taken a grammar
        self._ended, end = os.pipe2(os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)

    def run(self) -> None:
        """Fork until the other end of ``control`` is closed."""
        while True:
            while len(self._idle) < _IDLE and len(self._idle) + len(self._busy) < _MOST:
                self._idle.add(self._fork())
            select.select([self._taken, self._ended], [], [])
            with suppress(BlockingIOError):
                os.read(self._ended, 1024)
            ended = set(self._reap())
            with suppress(BlockingIOError):
                while data := os.read(self._taken, 64 * _PID.size):
                    taken = {pid for (pid,) in _PID.iter_unpack(data)}
                    self._idle -= taken
                    self._busy |= taken
            self._busy -= ended
            if self._idle & ended:  # it has seen the end
                break
        for pid in self._idle | self._busy:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> list[int]:
        found = list[int]()
        with suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
                found.append(pid)
        return found

    def _fork(self) -> int:
        if pid := os.fork():
            return pid
        try:
            signal.set_wakeup_fd(-1)
            self._serve()
        finally:
            os._exit(0)
        return 0

    def _serve(self) -> None:
        """Take one grammar, try it, and answer."""
        _, passed, *_ = socket.recv_fds(self._control, 1, 1)
        if not passed:
            return
        os.write(self._take, _PID.pack(os.getpid()))
        with socket.socket(fileno=passed[0]) as asker:
            text = b"".join(iter(lambda: asker.recv(1 << 18), b""))
            hung_up = select.poll()
            hung_up.register(asker, 0)
            if hung_up.poll(0):  # the request was cancelled meanwhile
                return
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the library says when it is killed
            threading.stack_size(STACK_BYTES)
            trial = threading.Thread(target=lambda: asker.sendall(json.dumps(_verdict(self._tokenizer, text)).encode()))
            trial.start()
            trial.join()


def _limit() -> None:
    """Have the kernel end this process where it takes too much."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)


def _data_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def _verdict(tokenizer: LLTokenizer, text: bytes) -> dict[str, Any]:
    """Return what a grammar takes, or why it cannot be honoured."""
    _limit()
    before, (kind, guide) = _data_bytes(), json.loads(text)
    try:
        written = write(kind, guide)
        begun_s = time.thread_time()
        matcher = compile_written(kind, written, tokenizer)
        seconds = time.thread_time() - begun_s
        _walk(kind, matcher)
        taken = max(0, _data_bytes() - before)
        del matcher  # the library frees some of it by calling itself, too
    except GrammarError as error:
        return {"reason": error.reason, "is_ours": error.is_ours}
    except BaseException as error:  # a failure inside the library is no Exception
        return {"reason": refused(kind, f"panic {error}").reason, "is_ours": True}
    return {"written": written, "seconds": seconds, "bytes": taken}


def _walk(kind: str, beginning: LLMatcher) -> None:
    """Follow the grammar for some tokens, as a row does.

    Raises:
        GrammarError: one of them takes too long, or a limit of the library is reached.
    """
    matcher, at = beginning.deep_copy(), 1
    until_s = time.thread_time() + _WALK_S
    for step in range(_MOST_TOKENS):
        begun_s = time.thread_time()
        matcher.compute_ff_tokens()
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        now_s = time.thread_time()
        if now_s - begun_s > MOST_TOKEN_S:
            raise GrammarError(kind, f"one token takes more than {MOST_TOKEN_S:g} s of processor time", is_ours=True)
        # Some token that is allowed, each time of another part of the vocabulary.
        at = at * 7919 % 65_536
        rest = allowed >> at or allowed
        token = (rest & -rest).bit_length() - 1 + (at if allowed >> at else 0)
        is_over = now_s > until_s and step >= _LEAST_TOKENS
        if is_over or not allowed or not matcher.consume_token(token) or matcher.is_stopped():
            break
    if reached := limit_of(matcher.get_error()):
        raise GrammarError(kind, reached, is_ours=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the vocabulary, and keep children waiting; exit status 0 when the other side has gone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the shards, with the tokenizer's files")
    parser.add_argument("vocab_size", type=int, help="of the model")
    arguments = parser.parse_args(argv)
    control = socket.socket(fileno=0)
    try:
        tokenizer = load_tokenizer(arguments.directory, arguments.vocab_size)
    except EngineError as error:
        sys.stderr.write(f"fastertransformer: grammars: {error}\n")
        return 1
    with suppress(GrammarError):  # the vocabulary may not have what JSON needs
        compile_written("json", write("json", ""), tokenizer)  # what each child would load and touch first
    os.nice(_NICE)
    gc.collect()
    gc.freeze()  # a collection would copy pages that children share
    Nursery(control, tokenizer).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
