"""Interactive generation: sessions, whose keys and values are kept between requests.

FasterTransformer's GPT guide, "Interactive Text Generation", and ``ParallelGpt.cc`` (``continue_gen``): a request with
START begins a session, the next ones send only what is new, and each answer shows the whole conversation. A row that an
end_id or a stop word has ended continues without that last token, which the next input overwrites there.
``memory_len`` keeps the last tokens' keys and values only. FasterTransformer has one session an instance; here there
are as many as memory allows, and the one that has been idle longest is evicted for a request that does not fit
otherwise. A cancelled request keeps the tokens that it has generated; a failed one leaves the session as it was before.
Keys and values that were lost with a failed step are computed again from the tokens when they are needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import RequestError
from ..request.adapters import Adapter
from ..request.parse import Request
from ..request.prompts import Context
from ..rows.sequence import Job, Sequence
from ..rows.transcript import SessionRow
from ..steps.steps import Steps


@dataclass
class Session:
    """A conversation."""

    rows: list[SessionRow]  # one for each row of its requests
    session_len: int  # the most tokens of a row; 0: as many as the model has positions
    memory_len: int  # tokens whose keys and values are kept; 0: all
    adapters: list[Adapter | None]  # of its rows
    is_busy: bool = False  # whether a request is in progress
    used_s: float = 0.0  # when the last request ended


class Sessions:
    """All sessions, by key; one that is idle for ``idle_s`` seconds is dropped.

    ``known`` are those from before the worker processes were restarted, whose keys and values are lost.
    """

    def __init__(self, steps: Steps, idle_s: float, known: dict[int | str, Session] | None = None) -> None:
        self._steps, self._idle_s, self._clock = steps, idle_s, time.monotonic
        self._allocator = steps.cache.allocator
        self.known = {} if known is None else known
        for session in self.known.values():
            session.is_busy = False
            for row in session.rows:
                row.saved = None

    @property
    def idle_timeout_s(self) -> float | None:
        """Seconds until a session may have been idle for too long; None: there is no session."""
        return self._idle_s if self.known else None

    @property
    def saved_pages(self) -> int:
        """Pages that are saved of all sessions."""
        return sum(len([page for page in row.saved or () if page]) for each in self.known.values() for row in each.rows)

    @property
    def _idle(self) -> dict[int | str, Session]:
        return {key: each for key, each in self.known.items() if not each.is_busy}

    def join(self, job: Job) -> None:
        """Begin or continue the session that a request names, if any, in the request's sequences.

        Raises:
            RequestError: there is no such session, it is busy, or the request does not fit it.
        """
        if job.session is None:
            return
        self.expire()
        contexts, request = [sequence.context for sequence in job.sequences], job.request
        self._check_kind(request, contexts)
        known = self.known.get(job.session)
        if known and known.is_busy:
            raise RequestError(f"session {job.session} has not answered its last request yet")
        if request.starts_session:
            adapters = [sequence.adapter for sequence in job.sequences]
            known = Session([SessionRow() for _ in contexts], request.session_len, request.memory_len, adapters)
        if known is None:
            why = f"it did not begin with START, has ended, failed, or was idle for {self._idle_s:g} s"
            raise RequestError(f"session {job.session} does not exist: {why}")
        if len(known.rows) != len(contexts):
            raise RequestError(f"session {job.session} has {len(known.rows)} rows, the request {len(contexts)}")
        if [sequence.adapter for sequence in job.sequences] != known.adapters:
            names = ", ".join(each.name if each else "none" for each in known.adapters)
            raise RequestError(f"session {job.session} began with the adapters {names}; its rows keep them")
        for sequence, row in zip(job.sequences, known.rows, strict=True):
            _check_lengths(sequence, row, known, self._steps.config.max_pos_seq_len)
        if request.starts_session:
            self.end(job.session)
        for sequence, row in zip(job.sequences, known.rows, strict=True):
            sequence.continue_session(row, known.memory_len)
        known.is_busy = True
        self.known[job.session] = known

    def _check_kind(self, request: Request, contexts: Iterable[Context]) -> None:
        if request.beam_width > 1 or any(each.embeddings is not None or each.prefix_length for each in contexts):
            raise RequestError("beam_width above 1 and prompts do not go with interactive generation")
        if request.memory_len and self._allocator.states:
            raise RequestError("memory_len: the states of this model's rows have seen all tokens, and forget none")

    def save(self, sequence: Sequence) -> None:
        """Save the entries of a row whose slot is about to be freed, if it is a session's."""
        if sequence.session_row and not sequence.job.request.ends_session:
            sequence.save_session()

    def finish(self, job: Job, has_failed: bool) -> None:
        """End a request: its session has its rows from now on, or the earlier ones if it has failed."""
        rows = [sequence.session_row for sequence in job.sequences if sequence.session_row]
        if job.session not in self.known or not rows:  # it has not joined
            return
        session = self.known[job.session]
        session.is_busy, session.used_s = False, self._clock()
        for row, before in zip(rows, session.rows, strict=True):
            if has_failed and row is not before:
                self._drop(row)
        if not has_failed:
            session.rows = rows
        if job.request.ends_session or (has_failed and job.request.starts_session):
            self.end(job.session)

    def end(self, key: int | str) -> None:
        """Drop a session, if it exists."""
        session = self.known.pop(key, None)
        for row in session.rows if session else ():
            self._drop(row)

    def _drop(self, row: SessionRow) -> None:
        self._allocator.free_saved(row.take_saved())

    def expire(self) -> None:
        """Drop the sessions that have been idle for too long."""
        deadline = self._clock() - self._idle_s
        for key, each in self._idle.items():
            if each.used_s < deadline:
                self.end(key)

    def evict_oldest(self) -> bool:
        """Drop the session that has been idle longest; false: none is idle."""
        if idle := self._idle:
            self.end(min(idle, key=lambda key: idle[key].used_s))
        return bool(idle)

    def evict_busy(self, jobs: Iterable[Job]) -> bool:
        """Drop what is saved of sessions whose requests wait; it is computed again later. False: nothing was saved."""
        rows = [sequence.session_row for job in jobs for sequence in job.sequences]
        saved = [row for row in rows if row and row.saved is not None]
        for row in saved:
            self._drop(row)
        return bool(saved)


def _check_lengths(sequence: Sequence, row: SessionRow, session: Session, positions: int) -> None:
    new, most = len(sequence.context.ids), min(session.session_len or positions, positions)
    total = len(row.tokens) + new + sequence.max_tokens
    if total > most:
        raise RequestError(
            f"row {sequence.row} would have {total} tokens: {len(row.tokens)} of the session, {new} of the"
            f" input, request_output_len {sequence.max_tokens}; session_len and max_pos_seq_len allow {most}"
        )
    if session.memory_len and new > session.memory_len:
        raise RequestError(f"row {sequence.row} has {new} tokens, over memory_len {session.memory_len}")
    if row.tokens and row.cached == len(row.tokens) and not len(sequence.shown):
        what = "continues a session with no input and nothing left to go on from"
        raise RequestError(f"row {sequence.row} {what}")
