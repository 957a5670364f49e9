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
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from ..cache.sizing import UNBOUNDED
from ..errors import GroupLostError, RequestError
from ..model.config import ModelConfig
from ..request.prompts import Context
from ..steps.steps import Steps
from .sequence import Job, Sequence


@dataclass
class Line:
    """One row of a conversation, as a request has left it.

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
class Session:
    """A conversation: its rows, how many tokens each may have, and how many of them are seen; 0: all."""

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
        known: those that began on other steps, which were lost with all keys and values.

    Attributes:
        known: all, by key.
    """

    def __init__(
        self, steps: Steps, config: ModelConfig, idle_s: float, known: dict[int | str, Session] | None = None
    ) -> None:
        self._steps, self._config, self._idle_s, self._clock = steps, config, idle_s, time.monotonic
        self.known = {} if known is None else known
        self._keys = count()
        for session in self.known.values():
            session.is_busy = False
            for line in session.lines:
                line.key = None

    @property
    def patience_s(self) -> float | None:
        """Seconds until a conversation may have been idle for too long; None: there is none."""
        return self._idle_s if self.known else None

    @property
    def idle_bytes(self) -> int:
        """Of what is saved of conversations that are idle. What a busy one has saved is within its request's need."""
        lines = [line for each in self._idle.values() for line in each.lines]
        return sum(self._steps.cache.bytes_of_saved(line.entries) for line in lines if line.key is not None)

    @property
    def _idle(self) -> dict[int | str, Session]:
        return {key: each for key, each in self.known.items() if not each.is_busy}

    def join(self, job: Job) -> None:
        """Let a request begin or continue a conversation, if it names one: its sequences learn what came before.

        Raises:
            RequestError: there is no such conversation, it is busy, or the request does not fit it.
        """
        if job.session is None:
            return
        self.expire()
        contexts = [sequence.context for sequence in job.sequences]
        if job.request.beam_width > 1 or any(each.embeddings is not None or each.prefix_length for each in contexts):
            raise RequestError("beam_width above 1 and prompts do not go with interactive generation")
        known = self.known.get(job.session)
        if known and known.is_busy:
            raise RequestError(f"session {job.session} has not answered its last request yet")
        if job.request.starts_session:
            # FasterTransformer takes the first row's lengths, which are all rows'.
            session_len, memory_len = (int(job.request.scalars[name][0]) for name in ("session_len", "memory_len"))
            known = Session([Line() for _ in job.sequences], session_len, memory_len)
        if known is None:
            why = f"it did not begin with START, has ended, failed, or was idle for {self._idle_s:g} s"
            raise RequestError(f"session {job.session} does not exist: {why}")
        self._check_lengths(job, known)
        if job.request.starts_session:
            self.end(job.session)
        for sequence, line in zip(job.sequences, known.lines, strict=True):
            _continue(sequence, line, known.memory_len)
        known.is_busy = True
        self.known[job.session] = known

    def _check_lengths(self, job: Job, session: Session) -> None:
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
            if line.tokens and line.cached == len(line.tokens) and not len(sequence.shown):
                what = "continues a session with no input and nothing left to go on from"
                raise RequestError(f"row {sequence.row} {what}")

    def take(self, sequence: Sequence) -> int:
        """Give the key of what was saved of a row, which is about to be put back into the cache; -1: there is none."""
        key, line = -1, sequence.line
        if line and line.key is not None:
            key, line.key = line.key, None
        sequence.lacks_past = line is not None and sequence.start > 0 and key < 0
        return key

    def save(self, sequence: Sequence) -> None:
        """Keep a row that leaves its slot, if it is a conversation's."""
        if not sequence.line or sequence.job.request.ends_session:
            return
        tokens = [*sequence.shown.tolist(), *sequence.beams[0].tokens]
        if sequence.beams[0].has_ended:
            tokens.pop()
        cached, key = min(sequence.cached, len(tokens)), next(self._keys)
        entries = min(cached, sequence.window)
        self._steps.save(sequence.slots[0], entries, key)
        sequence.line = Line(tokens, cached, key, entries)

    def leave(self, job: Job, has_failed: bool) -> None:
        """Note that a request is over: unless it has failed its conversation is what it has made of it."""
        lines = [sequence.line for sequence in job.sequences if sequence.line]
        if job.session not in self.known or not lines:  # it has not joined
            return
        session = self.known[job.session]
        session.is_busy, session.used_s = False, self._clock()
        for line, before in zip(lines, session.lines, strict=True):
            if has_failed and line is not before:
                self._forget(line)
        if not has_failed:
            session.lines = lines
        if job.request.ends_session or (has_failed and job.request.starts_session):
            self.end(job.session)

    def end(self, key: int | str) -> None:
        """Forget a conversation, if there is one."""
        session = self.known.pop(key, None)
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
        for key, each in self._idle.items():
            if each.used_s < deadline:
                self.end(key)

    def end_oldest(self) -> bool:
        """Forget the one that has been idle longest; false: there is none."""
        if idle := self._idle:
            self.end(min(idle, key=lambda key: idle[key].used_s))
        return bool(idle)


def _continue(sequence: Sequence, line: Line, window: int) -> None:
    """Let a sequence go on from a row of a conversation."""
    before, new = np.array(line.tokens, np.int64), sequence.context.ids
    if line.tokens and not len(sequence.shown):  # nothing new: the start token is for a beginning
        new = new[:0]
    sequence.context = Context(np.concatenate((before[line.cached :], new)))
    sequence.shown = np.concatenate((before, sequence.shown))
    sequence.line, sequence.start, sequence.window = line, line.cached, window or UNBOUNDED
