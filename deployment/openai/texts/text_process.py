"""The OpenAI endpoint's text processes: one has the tokenizers and forks the others, which read a request at a time.

A fork has the tokenizers at once, and may be killed where a text takes too long. The other end is text_pool.py.
"""

from __future__ import annotations

import gc
import math
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployment.openai.errors import ApiError
from deployment.openai.texts.offered_models import Models
from deployment.openai.texts.preparing import KINDS, BodyLimits, check, decompress, read_template
from deployment.processes.linux import die_with_parent
from handover.arguments import ScriptArguments
from handover.errors import ServerError, exit_status
from handover.ranges import COUNT, RANGE

HEAD = struct.Struct("<QQ")
TEMPLATES = "templates"
"""In place of a path's kind: asks which chat templates can be read."""


@dataclass(frozen=True)
class Limits:
    """What one process may use, and each request that it reads.

    Attributes:
        below_bytes: of the bodies that it reads; there is no shorter limit for them.
        processes: that read bodies of that size side by side.
        cpu_s: of a processor, for one request.
        wall_s: until it is killed, on busy processors too.
        memory_bytes: beyond what the process begins with.
        niceness: towards the event loop and the engine.
        is_reused: whether it reads more than one request.
    """

    below_bytes: float
    processes: int
    cpu_s: int
    wall_s: float
    memory_bytes: int
    niceness: int
    is_reused: bool = True


LANES = (
    Limits(64 << 10, processes=4, cpu_s=3, wall_s=30, memory_bytes=1 << 30, niceness=0),
    Limits(1 << 20, processes=2, cpu_s=15, wall_s=90, memory_bytes=1 << 30, niceness=5),
    Limits(math.inf, processes=2, cpu_s=60, wall_s=300, memory_bytes=2 << 30, niceness=10, is_reused=False),
)
"""A body goes to the first lane whose limit it is below, so that long ones do not hold up short ones."""


@dataclass(frozen=True)
class TextProcessArguments(ScriptArguments):
    """Read requests for the endpoint, which starts this program and gives it the models by its standard input."""

    control: int = field(metadata={RANGE: COUNT, "help": "socket by which the endpoint asks for processes"})
    parent: int = field(metadata={RANGE: COUNT, "help": "pid of the endpoint, with which this process ends"})


def main(argv: Sequence[str]) -> None:
    """Fork processes and end them as the parent asks, until it has gone.

    Raises:
        ServerError: somebody else has started this program.
    """
    arguments = TextProcessArguments.from_argv(argv, __doc__)
    die_with_parent()
    if os.getppid() != arguments.parent:
        raise ServerError("the endpoint that has started this process has gone", "start python -m deployment.openai")
    for each in (signal.SIGINT, signal.SIGTERM):  # are for the endpoint, which answers what it has begun
        signal.signal(each, signal.SIG_IGN)
    control = socket.socket(fileno=arguments.control)
    models: Models
    lanes: tuple[Limits, ...]
    models, lanes = pickle.load(sys.stdin.buffer)
    gc.freeze()  # or collections would copy the pages that forks share
    children = _Children()
    while True:
        order, files, _, _ = socket.recv_fds(control, 64, 1)
        if not order:
            return
        word, number = order.split()
        if word == b"fork":
            children.add(_fork(control, files[0], lanes[int(number)], models))
        else:
            control.send(b"%d" % children.end(int(number)))


class _Children:
    """What was forked. A pid stays a child's until it is waited for here, so that no other process is ever killed."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._ended: dict[int, int] = {}

    def add(self, pid: int) -> None:
        """Note a new one, and those that have ended meanwhile."""
        self._ended.pop(pid, None)
        self._running.add(pid)
        for child in tuple(self._running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                self._running.discard(child)
                self._ended[child] = status

    def end(self, pid: int) -> int:
        """End one and return its wait status; 0: there is no such child."""
        if pid not in self._running:
            return self._ended.pop(pid, 0)
        self._running.discard(pid)
        os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1]


def _fork(control: socket.socket, file: int, limits: Limits, models: Models) -> int:
    pid = os.fork()
    if pid:
        os.close(file)
        return pid
    try:
        control.close()
        die_with_parent()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # a library that panics would quote the text
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(limits.niceness)
        _serve(socket.socket(fileno=file), limits, models)
    finally:
        os._exit(0)


def _serve(connection: socket.socket, limits: Limits, models: Models) -> None:
    connection.sendall(HEAD.pack(os.getpid(), 0))
    reader = connection.makefile("rb")
    while head := reader.read(HEAD.size):
        content = reader.read(HEAD.unpack(head)[0])
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = math.ceil(used.ru_utime + used.ru_stime) + limits.cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
        name, body_limits, body, encoding = pickle.loads(content)
        try:
            answer, text = _answer(name, body_limits, body, encoding, models)
            begin = frame(answer, len(text))
        except MemoryError:
            why = "the request needs more memory than one request may", "send less at a time"
            begin, text = frame((*why, 400, None, None)), b""
        connection.sendall(begin)
        connection.sendall(text)


def _answer(
    name: str, limits: BodyLimits, content: bytes, encoding: str, models: Models
) -> tuple[tuple[Any, ...], bytes]:
    """Read one request: ``(engine, values, prompts)``, or why it is refused; and the whole answer, if that is it."""
    try:
        if name == TEMPLATES:
            return (_read_templates(models, content.decode()),), b""
        kind = KINDS[name]
        values, model = check(kind, decompress(content, encoding, limits.most_bytes), models, limits.most_answers)
        done = kind.work(model, values)
        values.update(dict.fromkeys(kind.heavy))
        if isinstance(done, bytes):
            return (model.engine, values, None), done
        return (model.engine, values, tuple(each.pack() for each in done)), b""
    except ApiError as error:
        return (error.problem, error.hint, error.status, error.param, error.code), b""
    except MemoryError:
        raise
    except BaseException as error:  # a panic of the tokenizers' library is no Exception
        why = f"the endpoint failed on this text ({type(error).__name__})", "send another text"
        return (*why, 500, None, None), b""


def _read_templates(models: Models, engine: str) -> str:
    """Return why a model's chat template cannot be read; empty: it can, or there is none."""
    try:
        read_template(models.find(engine))
    except ApiError as error:
        return error.problem
    return ""


def frame(content: tuple[Any, ...], behind: int = 0) -> bytes:
    """Write what is sent, with its length before it, and that of the bytes which come behind it."""
    data = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(data), behind) + data


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "openai"))
