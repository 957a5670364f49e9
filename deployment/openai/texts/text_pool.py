"""Read requests in processes beside the event loop, which every other request needs meanwhile.

The tokenizers' library and the JSON parser hold Python's lock for as long as a text takes, and a chat template is a
program of the checkpoint: in threads they would hold up everybody. The processes and their limits: text_process.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deployment.openai.errors import ApiError
from deployment.openai.texts.offered_models import Model, Models
from deployment.openai.texts.preparing import BodyLimits, Prompt
from deployment.openai.texts.text_process import HEAD, LANES, TEMPLATES, Limits, TextProcessArguments, frame

_PROJECT = Path(__file__).resolve().parents[3]
_PATIENCE_S = 20.0
"""For the process that forks: it answers within milliseconds once it has the tokenizers."""
_CHUNK = 1 << 18
_TOO_MUCH = (signal.SIGXCPU, signal.SIGABRT)
"""By which a process ends that needs more time, or more memory in a library that cannot go on without."""
Read = tuple[dict[str, Any], str, tuple[Prompt, ...] | memoryview]
"""The checked fields, the name of the model's engine, and the prompts or the whole answer."""


class _Plain(pickle.Unpickler):
    """Reads texts, numbers and what holds them, and nothing else: templates run at the other end."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


@dataclass
class _Process:
    """A process that reads requests, and our end of its socket."""

    pid: int
    connection: socket.socket

    def is_idle(self) -> bool:
        """Whether it still waits for a request."""
        try:
            self.connection.recv(1, socket.MSG_PEEK)  # the end of the connection, or what was not asked for
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def ask(self, question: bytes) -> tuple[tuple[Any, ...], memoryview]:
        """Send a question and wait for the answer and the bytes behind it; EOFError or OSError: it has ended."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.connection, question)
        begin = b""
        while len(begin) < HEAD.size:
            if not (more := await loop.sock_recv(self.connection, _CHUNK)):
                raise EOFError
            begin += more
        length, behind = HEAD.unpack_from(begin)
        found = memoryview(bytearray(length + behind))
        place = len(begin) - HEAD.size
        found[:place] = begin[HEAD.size :]
        while place < len(found):
            if not (size := await loop.sock_recv_into(self.connection, found[place : place + _CHUNK])):
                raise EOFError
            place += size
        answer: tuple[Any, ...] = _Plain(io.BytesIO(found[:length])).load()
        return answer, found[length:]


@dataclass
class _Lane:
    limits: Limits
    places: asyncio.Semaphore
    idle: list[_Process] = field(default_factory=list)


class _Parent:
    """The process that holds the tokenizers and forks the others.

    Args:
        models: whose tokenizers it loads.
    """

    def __init__(self, models: Models) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._turn = asyncio.Lock()
        with tempfile.TemporaryFile() as file, theirs:
            pickle.dump((models, LANES), file)
            file.seek(0)
            arguments = TextProcessArguments(theirs.fileno(), os.getpid())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deployment.openai.texts.text_process", *arguments.to_argv()],
                cwd=_PROJECT,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
                stdin=file,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    async def fork(self, lane: int) -> _Process:
        """Make a process; OSError or EOFError: there is none."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                socket.send_fds(self._control, [b"fork %d" % lane], [theirs.fileno()])
            hello = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(ours, HEAD.size), _PATIENCE_S)
            if len(hello) < HEAD.size:
                raise EOFError
        except BaseException:
            ours.close()
            raise
        return _Process(HEAD.unpack(hello)[0], ours)

    async def end(self, process: _Process) -> int:
        """End a process, if it has not ended; returns its wait status."""
        loop = asyncio.get_running_loop()
        try:
            async with self._turn:
                self._control.send(b"end %d" % process.pid)
                return int(await asyncio.wait_for(loop.sock_recv(self._control, 64), _PATIENCE_S) or 0)
        except (OSError, ValueError, asyncio.TimeoutError):
            self.close()  # and with it go all that it has forked
            return 0

    def close(self) -> None:
        """End it, and all processes that it has forked."""
        self._process.kill()
        self._process.wait()
        if not self._turn.locked():  # else somebody still listens there
            self._control.close()


class TextPool:
    """Reads requests in other processes, which begin with the first request."""

    def __init__(self, models: Models, body_limits: BodyLimits) -> None:
        self._models, self._body_limits = models, body_limits
        self._lanes = [_Lane(each, asyncio.Semaphore(each.processes)) for each in LANES]
        self._parent: _Parent | None = None
        self._ends: set[asyncio.Task[int]] = set()

    async def read(self, kind: str, content: bytes, encoding: str = "") -> Read:
        """Read a request.

        Raises:
            ApiError: it is refused, or needs more time or memory than one request may.
        """
        answer, text = await self._ask(kind, content, encoding)
        if len(answer) != 3:
            problem, hint, status, param, code = answer
            raise ApiError(problem, hint, status=status, param=param, code=code)
        engine, values, done = answer
        return values, engine, text if done is None else tuple(Prompt.unpack(*each) for each in done)

    async def check_templates(self) -> Models:
        """Look which chat templates can be read; returns the models with what is wrong with theirs."""
        checked = Models([replace(each, chat_problem=await self._problem(each)) for each in self._models.all])
        if any(each.chat_problem for each in checked.all):
            await self.close()  # those that come know
        self._models = checked
        return checked

    async def _problem(self, model: Model) -> str:
        if model.chat is None:
            return ""
        try:
            (problem,), _ = await self._ask(TEMPLATES, model.engine.encode())
        except ApiError as error:
            return f"the chat template cannot be read: {error.problem}"
        return str(problem)

    async def _ask(self, kind: str, content: bytes, encoding: str = "") -> tuple[tuple[Any, ...], memoryview]:
        size = self._body_limits.most_bytes if encoding else len(content)
        number, lane = next((n, each) for n, each in enumerate(self._lanes) if size < each.limits.below_bytes)
        async with lane.places:
            process = await self._process(number, lane)
            is_late = False

            def expire() -> None:
                nonlocal is_late
                is_late = True
                self._end(process)

            deadline = asyncio.get_running_loop().call_later(lane.limits.wall_s, expire)
            is_kept = False
            try:
                answer = await process.ask(frame((kind, self._body_limits, content, encoding)))
                is_kept = lane.limits.is_reused
                return answer
            except (OSError, EOFError) as error:
                raise _worded(lane.limits, is_late, await self._end(process)) from error
            finally:
                deadline.cancel()
                if is_kept:
                    lane.idle.append(process)
                else:  # it has read enough, or its client has gone
                    self._end(process)
                    process.connection.close()

    async def _process(self, number: int, lane: _Lane) -> _Process:
        while lane.idle:
            process = lane.idle.pop()
            if process.is_idle():
                return process
            self._end(process)
            process.connection.close()
        for _ in range(2):
            if self._parent is None or not self._parent.is_running:
                self._parent = _Parent(self._models)
            with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
                return await self._parent.fork(number)
            self._parent.close()
        raise ApiError("the endpoint has no process that reads this request", "send it again later", status=503)

    def _end(self, process: _Process) -> asyncio.Task[int]:
        assert self._parent is not None
        task = asyncio.get_running_loop().create_task(self._parent.end(process))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)
        return task

    async def close(self) -> None:
        """End all processes."""
        for lane in self._lanes:
            for process in lane.idle:
                process.connection.close()
            lane.idle.clear()
        if self._parent is not None:
            self._parent.close()
            self._parent = None


def _worded(limits: Limits, is_late: bool, status: int) -> ApiError:
    """Return why a process has not answered."""
    if is_late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in _TOO_MUCH):
        return ApiError(
            f"the request takes more than {limits.cpu_s} s of a processor, or more memory than one request may",
            "send less at a time; a chat template may be the cause too",
        )
    return ApiError("the process that was reading this request has ended", "send it again", status=500)
