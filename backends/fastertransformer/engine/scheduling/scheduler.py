"""Decide which sequences are in the next step, and take it.

A step is one token for every sequence in the batch. Those that have just come join it with their context's last hidden
state, so they have their first token at the same time as the others their next.

A GPU is kept busy by running ahead: a step is asked for before the tokens of the last one are looked at (they go from
step to step on the device). A sequence that turns out to have ended has then had a step too many, of which nothing is
kept; one that reaches its length has not, for that is known beforehand.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import torch

from ..cache.sizing import MOST_SLOTS
from ..errors import GroupLostError, RequestError
from ..sampling.sampler import Flight
from ..sampling.sampling import NOT_FINITE
from ..steps.steps import Steps
from .batch import Batch
from .outputs import output_tensors
from .sequence import CANCELLED, FAILED, INVALID, Answer, Job, Sequence
from .sessions import Session, Sessions

_PREFILL_TOKENS = 4096  # of one prefill pass, padding included: bounds its memory and what others wait for it

_log = logging.getLogger(__name__)


class Scheduler:
    """Sequences that wait and sequences that are in the batch.

    Args:
        steps: the network and its cache.
        max_rows: sequences in the batch at most.
        is_inflight: whether sequences join a batch that is under way; else a batch is filled, and the next one begins
            when it is done (FasterTransformer's static batching).
        session_idle_s: seconds after which a conversation is forgotten.
        runs_ahead: whether a step is asked for before the last one's tokens are known; None: on a GPU.
        conversations: those that began on other steps; see Sessions.

    Attributes:
        sessions: conversations.
    """

    def __init__(
        self,
        steps: Steps,
        max_rows: int,
        is_inflight: bool = True,
        session_idle_s: float = 60.0,
        runs_ahead: bool | None = None,
        conversations: dict[int | str, Session] | None = None,
    ) -> None:
        self._steps, self._max_rows, self._is_inflight = steps, max_rows, is_inflight
        self._waiting: deque[Sequence] = deque()
        self._batch = Batch(steps)
        self._is_filling = True  # whether the batch takes more
        self._flights: deque[Flight] = deque()  # of tokens that have been asked for
        self._runs_ahead = steps.device.type == "cuda" if runs_ahead is None else runs_ahead
        self.sessions = Sessions(steps, steps.config, session_idle_s, conversations)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._batch or self._waiting)

    def add(self, job: Job) -> None:
        """Let a request wait for its turn; one that can never fit is answered at once."""
        try:
            job.sequences = [Sequence(job, row) for row in range(job.request.batch_size)]
            self.sessions.join(job)
            for sequence in job.sequences:
                self._check_need(sequence)
        except Exception as error:
            if not isinstance(error, RequestError):
                _log.exception("a request was not taken")
            self._end(job, Answer(None, str(error), code=INVALID))
        else:
            self._waiting.extend(job.sequences)

    def _check_need(self, sequence: Sequence) -> None:
        cache = self._steps.cache
        if (need := cache.bytes_of([sequence.need])) > cache.budget_bytes:
            tokens = sequence.entries + sequence.source_length
            raise RequestError(
                f"row {sequence.row} needs {need} bytes of KV cache: {sequence.width} x {tokens} tokens of"
                f" {cache.shape.token_bytes} bytes; there are {cache.budget_bytes} (see kv_cache_bytes)"
            )

    @torch.inference_mode()
    def step(self) -> None:
        """Have every sequence in the batch given its next token."""
        for job in _jobs([*self._batch, *self._waiting]):
            if _is_cancelled(job):
                self._end(job, Answer(None, "cancelled", code=CANCELLED))
        new = self._admit()
        suspects: Iterable[Sequence] = new
        try:
            hidden = self._batch.join(new, self.sessions.take) if new else None
            suspects = self._batch
            depth = 0
            if any(sequence.goes_on for sequence in self._batch):
                self._flights.append(self._batch.launch(hidden))
                depth = int(self._runs_ahead and not any(sequence.needs_host for sequence in self._batch))
            while len(self._flights) > depth:
                self._deliver(self._land(self._flights.popleft()))
            self._deliver([sequence for sequence in self._batch if sequence.is_done])  # by an encoder alone
        except GroupLostError:
            raise
        except Exception as error:
            _log.exception("a step failed")
            self._isolate(list(suspects), f"generation failed: {error}")

    def _isolate(self, failed: list[Sequence], problem: str) -> None:
        """Begin anew with sequences that have failed together, one after the other, to see whose fault it was.

        One that was alone fails.
        """
        self._leave(failed)
        if len(failed) == 1:
            self._end(failed[0].job, Answer(None, problem, code=FAILED))
            return
        for sequence in reversed(failed):
            sequence.begin_anew()
            self._waiting.appendleft(sequence)
        self._is_filling = True

    @torch.inference_mode()  # the cache was made in it, and may be written to
    def give_up(self, problem: str, only_begun: bool = False) -> list[Job]:
        """Answer requests with a problem: those that have been in the batch, or all; give the others, in order."""
        jobs = _jobs([*self._batch, *self._waiting])
        with suppress(GroupLostError):  # nobody is left to take the step with
            self._leave(list(self._batch))
        for job in jobs:
            if job.has_begun or not only_begun:
                self._end(job, Answer(None, problem, code=FAILED))
        return _jobs(self._waiting)

    # Coming.

    def _admit(self) -> list[Sequence]:
        """Take those that wait and fit into the batch, in order, as many as one prefill pass takes."""
        self._is_filling |= self._is_inflight or not self._batch
        new: list[Sequence] = []
        while self._is_filling and self._waiting:
            more = [*new, self._waiting[0]]
            if not self._fits(more):
                # Where nothing else is in the way, conversations that are idle are.
                if self._batch or new or not self.sessions.end_oldest():
                    break
            elif self._is_one_pass(more):
                new.append(self._waiting.popleft())
                new[-1].job.has_begun = True
            else:
                return new
        self._is_filling = self._is_inflight
        return new

    def _fits(self, new: list[Sequence]) -> bool:
        everyone = [*self._batch, *new]
        if len(everyone) > 1 and any(each.count < each.alone_for for each in everyone):
            return False
        cache = self._steps.cache
        has_slots = len(everyone) <= self._max_rows and sum(each.width for each in everyone) <= MOST_SLOTS
        needed = cache.bytes_of([each.need for each in everyone])
        return has_slots and needed + self.sessions.idle_bytes <= cache.budget_bytes

    def _is_one_pass(self, new: list[Sequence]) -> bool:
        if len(new) == 1:
            return True
        lengths = [max(len(each.context.ids), each.source_length) for each in new]
        # Behind something that is in the cache already the device pads them to the longest.
        tokens = len(new) * max(lengths) if any(each.start for each in new) else sum(lengths)
        return tokens <= _PREFILL_TOKENS and not any(each.alone_for >= 0 or each.line for each in new)

    # Going on.

    def _land(self, flight: Flight) -> list[Sequence]:
        """Hand out tokens that have come to the host; give the sequences that have some."""
        landed = flight.land()
        self._steps.raise_if_rank_lost()
        here = set(self._batch)  # others have left
        lost: dict[Job, int] = {}  # a row whose numbers are infinite or NaN
        for (sequence, _), token, gains in landed:
            if sequence not in here:
                continue
            if token == NOT_FINITE:
                lost[sequence.job] = sequence.row
            elif sequence.width == 1 and sequence.limit:
                sequence.put(sequence.beams[0], token, *gains)
        found = [sequence for (sequence, beam), _, _ in landed if not beam and sequence in here]
        for sequence in found:
            sequence.finish()
        if lost:
            self._steps.raise_if_peer_timed_out()
            # They would spoil whoever has their slots next.
            self._batch.wipe([sequence for sequence in self._batch if sequence.job in lost])
        for job, row in lost.items():
            problem = f"generation failed: the network's numbers overflow in row {row}"
            hint = "; fp16 reaches 65504, bf16 as far as fp32, and so may prompt embeddings"
            self._end(job, Answer(None, problem + hint, code=FAILED))
        return [sequence for sequence in found if sequence.job not in lost]

    # Leaving.

    def _deliver(self, news: list[Sequence]) -> None:
        """Answer what is done or streams of sequences that have news, and let those that are done leave."""
        self._leave([sequence for sequence in self._batch if sequence.is_done], is_saved=True)
        for job in _jobs(news):
            if not (job.is_done or (job.is_streaming and job.has_news)):
                continue
            try:
                answer = Answer(output_tensors(job), is_final=job.is_done)
            except Exception as error:
                _log.exception("an answer could not be laid out")
                answer = Answer(None, f"generation failed: {error}", code=FAILED)
            if answer.is_final:
                self._end(job, answer)
            elif not _is_taken(job, answer):
                self._end(job, None)

    def _end(self, job: Job, answer: Answer | None) -> None:
        """Take all sequences of a request out, and give it its last answer, if it takes one."""
        is_cancelled = answer is not None and answer.code == CANCELLED
        self._leave([sequence for sequence in self._batch if sequence.job is job], is_saved=is_cancelled)
        self._waiting = deque(sequence for sequence in self._waiting if sequence.job is not job)
        self.sessions.leave(job, has_failed=answer is None or answer.code not in ("", CANCELLED, INVALID))
        if answer:
            _is_taken(job, answer)

    def _leave(self, sequences: list[Sequence], is_saved: bool = False) -> None:
        """Free slots; keep what conversations go on from."""
        for sequence in sequences if is_saved else ():
            self.sessions.save(sequence)
        self._batch.leave(sequences)
        if not self._batch:
            self._flights.clear()


def _jobs(sequences: Iterable[Sequence]) -> list[Job]:
    return list(dict.fromkeys(sequence.job for sequence in sequences))


def _is_cancelled(job: Job) -> bool:
    try:
        return job.is_cancelled is not None and job.is_cancelled()
    except Exception:
        _log.exception("is_cancelled failed")
        return True


def _is_taken(job: Job, answer: Answer) -> bool:
    """Hand an answer over; false if its taker failed."""
    try:
        job.answer(answer)
    except Exception:
        _log.exception("an answer was not taken")
        return False
    return True
