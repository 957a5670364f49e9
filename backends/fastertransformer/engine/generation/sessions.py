"""Interactive generation: conversations whose keys and values are kept between requests.

FasterTransformer's GPT guide, "Interactive Text Generation", and ``ParallelGpt.cc`` (``continue_gen``): a request with
START begins a conversation, the next ones send only what is new, and each answer shows all of it. A row that an end_id
or a stop word has ended goes on without that last token, which the next input overwrites there. ``memory_len`` keeps
the last tokens' keys and values only. FasterTransformer has one conversation an instance; here there are as many as
memory allows, and the one that has been idle longest makes room for a request that fits otherwise not. A request that
is cancelled leaves what has come so far; one that fails leaves the conversation as it was before. Keys and values that
went with a step that failed are computed again from the tokens, when they are needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from ..checkpoint.config import ModelConfig
from ..errors import GroupLostError, RequestError
from ..network.steps import Steps
from ..requests.prompts import Context
from .sequence import Job, Sequence


@dataclass
class Line:
    """One row of a conversation.

    Attributes:
        tokens: all of it.
        cached: how many of them have keys and values.
        key: where those are saved; None: in no place, or in the batch.
        entries: of the cache that are saved.
    """

    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    key: int | None = None
    entries: int = 0


@dataclass
class _Session:
    lines: list[Line]
    session_len: int
    memory_len: int
    is_busy: bool = False
    used_s: float = 0.0


class Sessions:
    """All conversations.

    Args:
        steps: keep what is saved.
        config: dimensions.
        idle_s: seconds after which a conversation is forgotten.
        clock: gives seconds.
    """

    def __init__(
        self, steps: Steps, config: ModelConfig, idle_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps, self._config, self._idle_s, self._clock = steps, config, idle_s, clock
        self._sessions: dict[int | str, _Session] = {}
        self._keys = count()

    @property
    def patience_s(self) -> float | None:
        """Seconds until a conversation may have been idle for too long; None: there is none."""
        return self._idle_s if self._sessions else None

    @property
    def idle_bytes(self) -> int:
        """Of what is saved of conversations that are idle. What a busy one has saved is within its request's need."""
        idle = [line for each in self._sessions.values() if not each.is_busy for line in each.lines]
        return sum(self._steps.cache.bytes_of_saved(line.entries) for line in idle if line.key is not None)

    def join(self, job: Job) -> None:
        """Let a request begin or continue the conversation that it names: its sequences learn what came before.

        Raises:
            RequestError: there is no such conversation, it is busy, or the request does not fit it.
        """
        assert job.session is not None
        self.expire()
        contexts = [sequence.context for sequence in job.sequences]
        if job.request.beam_width > 1 or any(each.embeddings is not None or each.prefix_length for each in contexts):
            raise RequestError("beam_width above 1 and prompts do not go with interactive generation")
        known = self._sessions.get(job.session)
        if known and known.is_busy:
            raise RequestError(f"session {job.session} has not answered its last request yet")
        if job.request.starts_session:
            self._check_lengths(job, known := self._new(job))
            self.end(job.session)
        elif known is None:
            why = f"it did not begin with START, has ended, failed, or was idle for {self._idle_s:g} s"
            raise RequestError(f"session {job.session} does not exist: {why}")
        else:
            self._check_lengths(job, known)
        for sequence, line in zip(job.sequences, known.lines, strict=True):
            _continue(sequence, line, known.memory_len)
        known.is_busy = True
        self._sessions[job.session] = known

    def _new(self, job: Job) -> _Session:
        scalars = job.request.scalars
        # FasterTransformer takes the first row's, which is all rows'.
        session_len, memory_len = (int(scalars[name][0]) for name in ("session_len", "memory_len"))
        return _Session([Line() for _ in job.sequences], session_len, memory_len)

    def _check_lengths(self, job: Job, session: _Session) -> None:
        if len(session.lines) != len(job.sequences):
            raise RequestError(f"session {job.session} has {len(session.lines)} rows, the request {len(job.sequences)}")
        most = min(session.session_len or self._config.max_pos_seq_len, self._config.max_pos_seq_len)
        for sequence, line in zip(job.sequences, session.lines, strict=True):
            new = len(sequence.context.ids)
            total = len(line.tokens) + new + sequence.limit
            if total > most:
                raise RequestError(
                    f"row {sequence.row} would have {total} tokens: {len(line.tokens)} of the session, {new} of the"
                    f" input, request_output_len {sequence.limit}; session_len and max_pos_seq_len allow {most}"
                )
            if session.memory_len and new > session.memory_len:
                raise RequestError(f"row {sequence.row} has {new} tokens, over memory_len {session.memory_len}")

    def take(self, sequence: Sequence) -> int:
        """Give the key of what was saved of a row, which is about to be put back into the cache; -1: there is none."""
        key, line = -1, sequence.line
        if line and line.key is not None:
            key, line.key = line.key, None
        sequence.lacks_past = line is not None and sequence.start > 0 and key < 0
        return key

    def save(self, sequence: Sequence) -> None:
        """Keep a row that leaves its slot."""
        line = sequence.line
        assert line
        tokens = [*sequence.shown, *sequence.tokens[0]]
        if sequence.has_ended[0]:
            tokens.pop()
        cached, key = min(sequence.cached, len(tokens)), next(self._keys)
        entries = min(cached, sequence.window) if sequence.window else cached
        self._steps.save(sequence.slots[0], entries, key)
        line.tokens, line.cached, line.entries, line.key = tokens, cached, entries, key

    def leave(self, job: Job, has_failed: bool) -> None:
        """Note that a request is over; where it has failed its conversation is again what it was before."""
        if job.session in self._sessions:
            session = self._sessions[job.session]
            session.is_busy, session.used_s = False, self._clock()
            if job.request.ends_session or (has_failed and job.request.starts_session):
                self.end(job.session)
            elif has_failed:
                for sequence, line in zip(job.sequences, session.lines, strict=True):
                    self._take_back(sequence, line)

    def _take_back(self, sequence: Sequence, line: Line) -> None:
        """Let a row have its tokens of before, if some have been put behind them: others of its request failed."""
        if len(line.tokens) > sequence.known:
            self._forget(line)
            line.tokens, line.cached = line.tokens[: sequence.known], sequence.start

    def detach(self) -> dict[int | str, _Session]:
        """Give all conversations without their keys and values, to go on with other steps."""
        for session in self._sessions.values():
            session.is_busy = False
            for line in session.lines:
                line.key, line.entries = None, 0
        return self._sessions

    def attach(self, sessions: dict[int | str, _Session]) -> None:
        """Go on with what another has detached."""
        self._sessions |= sessions

    def end(self, key: int | str) -> None:
        """Forget a conversation, if there is one."""
        session = self._sessions.pop(key, None)
        for line in session.lines if session else ():
            self._forget(line)

    def _forget(self, line: Line) -> None:
        if line.key is not None:
            with suppress(GroupLostError):  # all is forgotten then
                self._steps.forget(line.key)
            line.key = None

    def expire(self) -> None:
        """Forget the conversations that have been idle for too long."""
        deadline = self._clock() - self._idle_s
        for key in [key for key, each in self._sessions.items() if not each.is_busy and each.used_s < deadline]:
            self.end(key)

    def end_oldest(self) -> bool:
        """Forget the one that has been idle longest; false: there is none."""
        idle = {key: each.used_s for key, each in self._sessions.items() if not each.is_busy}
        if idle:
            self.end(min(idle, key=lambda key: idle[key]))
        return bool(idle)


def _continue(sequence: Sequence, line: Line, window: int) -> None:
    """Let a sequence go on from a row of a conversation."""
    pending, new = line.tokens[line.cached :], sequence.context.ids
    if line.tokens and not sequence.shown:  # nothing new: the start token is for a beginning
        new = new[:0]
    ids = np.concatenate((np.array(pending, np.int64), new))
    if not len(ids):
        raise RequestError(f"row {sequence.row} continues a session with no input and nothing left to go on from")
    sequence.context = Context(ids)
    sequence.line, sequence.start, sequence.known, sequence.window = line, line.cached, len(line.tokens), window
    sequence.shown = [*line.tokens, *sequence.shown]
