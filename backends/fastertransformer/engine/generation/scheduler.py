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
from contextlib import suppress

import torch
from torch import Tensor

from ..attention.cache import MOST_SLOTS, Need
from ..errors import GroupLostError, RequestError
from ..network.steps import Steps
from .batch import Batch
from .choice import Flight
from .contexts import are_packed, run_contexts
from .sampling import LOST
from .sequence import CANCELLED, FAILED, INVALID, Answer, Job, Sequence, output_tensors
from .sessions import Sessions

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
    ) -> None:
        self._steps, self._max_rows, self._is_inflight = steps, max_rows, is_inflight
        self._waiting: deque[Sequence] = deque()
        self._chosen: deque[Sequence] = deque()  # of the next batch, where batches are static
        self._batch = Batch(steps)
        self._flights: deque[Flight] = deque()  # of tokens that have been asked for
        self._runs_ahead = steps.device.type == "cuda" if runs_ahead is None else runs_ahead
        self.sessions = Sessions(steps, steps.config, session_idle_s)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._batch or self._waiting or self._chosen)

    def add(self, job: Job) -> None:
        """Let a request wait for its turn; one that can never fit is answered at once."""
        cache = self._steps.cache
        if job.session is not None:
            try:
                self.sessions.join(job)
            except RequestError as error:
                _answer(job, Answer(None, str(error), code=INVALID))
                return
        for sequence in job.sequences:
            if (need := cache.bytes_of([_need(sequence)])) > cache.budget_bytes:
                problem = (
                    f"row {sequence.row} needs {need} bytes of KV cache: {sequence.width} x"
                    f" {sequence.need + sequence.source_length} tokens of {cache.shape.token_bytes} bytes; there are"
                    f" {cache.budget_bytes} (see kv_cache_bytes)"
                )
                self._finish(job, Answer(None, problem, code=INVALID))
                return
        self._waiting.extend(job.sequences)

    @torch.inference_mode()
    def step(self) -> None:
        """Have every sequence in the batch given its next token."""
        self._drop_cancelled()
        before = len(self._batch.owners)
        hidden = self._prefill(self._admit())
        if hidden is None:  # nobody has come, or a decoder that begins with one token: with a step like any other
            before = len(self._batch.owners)
        try:
            depth = 0
            if any(sequence.launched < sequence.steps for sequence in self._batch):
                self._flights.append(self._batch.launch(before, hidden))
                depth = int(self._runs_ahead and not any(sequence.needs_host for sequence in self._batch))
            while len(self._flights) > depth:
                self._deliver(self._land(self._flights.popleft()))
            if any(sequence.is_done for sequence in self._batch):  # by an encoder alone
                self._deliver(list(self._batch))
        except GroupLostError:
            raise
        except Exception as error:
            _log.exception("a step of %d sequences failed", len(self._batch))
            self._isolate(f"generation failed: {error}")

    def _isolate(self, problem: str) -> None:
        """Begin anew with the sequences of a step that failed, one after the other, to see whose fault it was.

        One that was alone fails.
        """
        failed = list(self._batch)
        self._leave(failed)
        if len(failed) == 1:
            self._drop(failed[0].job, Answer(None, problem, code=FAILED))
        else:
            again = [each.begin_anew() for each in failed]
            (self._waiting if self._is_inflight else self._chosen).extendleft(reversed(again))

    @torch.inference_mode()  # the cache was made in it, and may be written to
    def give_up(self, problem: str) -> None:
        """Answer everything that waits or is in the batch with a problem."""
        jobs = self._jobs([*self._batch, *self._waiting, *self._chosen])
        with suppress(GroupLostError):  # nobody is left to take the step with
            self._leave(list(self._batch))
        for job in jobs:
            self._drop(job, Answer(None, problem, code=FAILED))

    def surrender(self, problem: str) -> list[Job]:
        """Answer what has begun with a problem; give the requests that have not, in order, to go on elsewhere."""
        jobs = self._jobs([*self._batch, *self._chosen, *self._waiting])
        begun = {sequence.job for sequence in self._batch}
        begun |= {job for job in jobs if any(each.count or each.answered or each.is_done for each in job.sequences)}
        self._chosen, self._waiting = deque(), deque(job.sequences[0] for job in jobs if job in begun)
        self.give_up(problem)
        return [job for job in jobs if job not in begun]

    # Coming.

    def _admit(self) -> list[Sequence]:
        """Take those that wait and fit into the batch, in order, as many as one prefill pass takes."""
        self._make_room()
        queue = self._waiting
        if not self._is_inflight:
            if not self._batch and not self._chosen:
                while self._waiting and self._fits([*self._chosen, self._waiting[0]]):
                    self._chosen.append(self._waiting.popleft())
            queue = self._chosen
        new: list[Sequence] = []
        while queue and self._is_one_pass([*new, queue[0]]) and self._fits([*new, queue[0]]):
            new.append(queue.popleft())
        return new

    def _make_room(self) -> None:
        """Where nothing is in the batch the next sequence fits, but for conversations that are idle."""
        while not self._batch and (queue := self._chosen or self._waiting) and not self._fits([queue[0]]):
            if not self.sessions.end_oldest():
                return

    def _fits(self, new: list[Sequence]) -> bool:
        everyone = [*self._batch, *new]
        if len(everyone) > 1 and any(each.is_suspect for each in everyone):
            return False
        cache = self._steps.cache
        has_slots = len(everyone) <= self._max_rows and sum(each.width for each in everyone) <= MOST_SLOTS
        return has_slots and cache.bytes_of(map(_need, everyone)) + self.sessions.idle_bytes <= cache.budget_bytes

    def _is_one_pass(self, new: list[Sequence]) -> bool:
        if len(new) == 1:
            return True
        lengths = [max(len(each.context.ids), each.source_length) for each in new]
        tokens = sum(lengths) if are_packed(self._steps, new) else len(new) * max(lengths)
        return tokens <= _PREFILL_TOKENS and not any(each.runs_alone or each.line for each in new)

    def _prefill(self, new: list[Sequence]) -> Tensor | None:
        """Run the contexts of new sequences; give the last hidden state of each of their slots, see run_contexts."""
        if not new:
            return None
        try:
            first = self._batch.join(new, self.sessions.take)
            hidden = run_contexts(self._steps, new, first)
            self._batch.begin(first)
            return hidden
        except GroupLostError:
            raise
        except Exception as error:
            _log.exception("the contexts of %d sequences failed", len(new))
            self._leave(new)
            if len(new) == 1:
                self._drop(new[0].job, Answer(None, f"generation failed: {error}", code=FAILED))
            for sequence in reversed(new if len(new) > 1 else []):  # whose fault was it?
                sequence.runs_alone = True
                (self._waiting if self._is_inflight else self._chosen).appendleft(sequence)
            return None

    # Going on.

    def _land(self, flight: Flight) -> list[Sequence]:
        """Hand out tokens that have come to the host; give the sequences that have some."""
        tokens, log_probs = flight.land()
        self._steps.check()
        here = set(self._batch)
        found = [sequence for sequence, place in flight.owners if not place and sequence in here]  # others have left
        here, lost = set(found), []
        for slot, ((sequence, _), token) in enumerate(zip(flight.owners, tokens, strict=True)):
            if sequence not in here:
                continue
            if token == LOST:
                lost.append(sequence)
            elif sequence.width == 1 and sequence.limit:
                if slot in log_probs:
                    full, reported = log_probs[slot]
                    sequence.scores[0] += full
                    sequence.log_probs[0].append(reported)
                sequence.take(0, token)
        for sequence in found:
            sequence.count += 1
            sequence.is_done = sequence.finish()
        self._drop_lost(list(dict.fromkeys(lost)))
        return found

    def _drop_lost(self, lost: list[Sequence]) -> None:
        """Fail the requests whose numbers are infinite or NaN: they would spoil whoever has their slots next."""
        if lost:
            self._steps.doubt()
            self._batch.wipe(lost)
        for sequence in lost:
            problem = f"generation failed: the network's numbers overflow in row {sequence.row}"
            hint = "; fp16 reaches 65504, bf16 as far as fp32, and so may prompt embeddings"
            if sequence in self._batch:
                self._drop(sequence.job, Answer(None, problem + hint, code=FAILED))

    # Leaving.

    def _deliver(self, news: list[Sequence]) -> None:
        """Answer what is done or streams of sequences that have news, and let those that are done leave."""
        here = set(self._batch)
        jobs = self._jobs([sequence for sequence in news if sequence in here])
        self._save([sequence for sequence in self._batch if sequence.is_done])
        self._leave([sequence for sequence in self._batch if sequence.is_done])
        for job in jobs:
            if job.is_done or (job.is_streaming and not job.is_known):
                try:
                    answer = Answer(output_tensors(job), is_final=job.is_done)
                except Exception as error:
                    _log.exception("an answer could not be laid out")
                    answer = Answer(None, f"generation failed: {error}", code=FAILED)
                if not job.is_done:
                    if not _answer(job, answer):
                        self._drop(job)
                else:
                    self._finish(job, answer)

    def _drop_cancelled(self) -> None:
        for job in self._jobs([*self._batch, *self._waiting, *self._chosen]):
            try:
                is_cancelled = job.is_cancelled is not None and job.is_cancelled()
            except Exception:
                _log.exception("is_cancelled failed")
                is_cancelled = True
            if is_cancelled:
                self._drop(job, Answer(None, "cancelled", code=CANCELLED))

    @staticmethod
    def _jobs(sequences: list[Sequence]) -> list[Job]:
        return list(dict.fromkeys(sequence.job for sequence in sequences))

    def _drop(self, job: Job, answer: Answer | None = None) -> None:
        """Take all sequences of a request out."""
        if answer and answer.code == CANCELLED:
            self._save([sequence for sequence in self._batch if sequence.job is job])
        self._leave([sequence for sequence in self._batch if sequence.job is job])
        for name in ("_waiting", "_chosen"):
            setattr(self, name, deque(each for each in getattr(self, name) if each.job is not job))
        self._finish(job, answer)

    def _finish(self, job: Job, answer: Answer | None) -> None:
        """Give a request its last answer, if it takes one."""
        if job.session is not None:
            self.sessions.leave(job, has_failed=answer is None or answer.code not in ("", CANCELLED, INVALID))
        if answer:
            _answer(job, answer)

    def _save(self, sequences: list[Sequence]) -> None:
        """Keep what conversations go on from."""
        for sequence in sequences:
            if sequence.line and not sequence.job.request.ends_session:
                self.sessions.save(sequence)

    def _leave(self, sequences: list[Sequence]) -> None:
        """Free slots."""
        self._batch.leave(sequences)
        if not self._batch:
            self._flights.clear()


def _need(sequence: Sequence) -> Need:
    return sequence.width, sequence.need, sequence.source_length


def _answer(job: Job, answer: Answer) -> bool:
    """Hand an answer over; false if its taker failed."""
    try:
        job.answer(answer)
    except Exception:
        _log.exception("an answer was not taken")
        return False
    return True
