"""Take steps: give every sequence in the batch its next token, and answer the requests.

A step is one token for every sequence in the batch. New sequences join with their context's last hidden state, so they
get their first token in the step that gives the other sequences their next.

A GPU is kept busy by stepping ahead: a step is launched before the tokens of the last one are read (on the device they
go from step to step), though no earlier than it has to be, see launch_times.py. If a sequence turns out to have ended,
the token of its surplus step is dropped. A sequence that reaches its length has no surplus step, for that is known
beforehand.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress

import torch

from ..errors import EngineError, GroupLostError, RequestError
from ..rows.answer import CANCELLED, INVALID, UNAVAILABLE, Answer, Failure
from ..rows.sequence import Job, Sequence
from ..steps.steps import Steps
from .batch import Batch
from .jobs import check_need, end_grammars, is_cancelled, note_adapters, send
from .launch_times import LaunchTimes
from .metrics import EngineMetrics
from .outputs import answer_so_far
from .proposers import Drafts
from .sessions import Session, Sessions
from .speculation import Speculation
from .tokens import append_tokens, grammar_failures, overflow_in
from .waiting import NO_LIMITS, QueueLimits, WaitingQueue, jobs_of

_log = logging.getLogger(__name__)


class Scheduler:
    """Sequences that wait and sequences that are in the batch.

    Args:
        steps: the network and its cache.
        max_rows: sequences in the batch at most.
        is_inflight: whether sequences join a batch that is under way; else a batch is filled, and the next one begins
            when it is done (FasterTransformer's static batching).
        session_idle_s: seconds after which an idle session is dropped.
        steps_ahead: whether a step is launched before the last one's tokens are read; None: only on a GPU.
        known_sessions: see Sessions.
        limits: of the requests that wait.
        metrics: counts what happens; None: of its own.
        chunk_tokens: see Chunks.
        drafts: tokens of a draft at most, and whether rows have some by default; see Speculation.
    """

    def __init__(
        self,
        steps: Steps,
        max_rows: int,
        *,
        is_inflight: bool = True,
        session_idle_s: float = 60.0,
        steps_ahead: bool | None = None,
        known_sessions: dict[int | str, Session] | None = None,
        limits: QueueLimits = NO_LIMITS,
        metrics: EngineMetrics | None = None,
        chunk_tokens: int = 0,
        drafts: tuple[int, bool] = (0, False),
    ) -> None:
        self._limits, self.metrics = limits, metrics or EngineMetrics(draft_tokens=drafts[0])
        self._steps, self._batch = steps, Batch(steps)
        self._steps_ahead = steps.device.type == "cuda" if steps_ahead is None else steps_ahead
        self._times = LaunchTimes()
        self._speculation = Speculation(steps, *drafts, self.metrics)
        self.sessions = Sessions(steps, session_idle_s, known_sessions)
        self._waiting = WaitingQueue(
            steps,
            self._batch,
            sessions=self.sessions,
            metrics=self.metrics,
            max_rows=min(max_rows, steps.cache.allocator.most_rows),
            is_inflight=is_inflight,
            chunk_tokens=chunk_tokens,
        )

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits or decodes."""
        return not (self._batch or self._waiting)

    @property
    def is_decoding(self) -> bool:
        """Whether sequences are in the batch."""
        return bool(self._batch)

    @property
    def spare_s(self) -> float:
        """Seconds for which the next step may wait for arrivals, because the GPU is busy with the last one."""
        return self._times.spare_s(bool(self._waiting)) if self._batch.pending and not self._waiting.begun else 0.0

    def add(self, job: Job) -> None:
        """Queue a request; one that can never fit, or that finds too many others waiting, is answered at once."""
        if problem := self._limits.problem_at_arrival(job, self._waiting.jobs):
            self._finish(job, Failure(problem, UNAVAILABLE))
            return
        try:
            job.sequences = [Sequence(job, row, self._steps.cache.allocator) for row in range(len(job.request.rows))]
            note_adapters(job, 1)
            self.sessions.join(job)
            for sequence in job.sequences:
                check_need(sequence, self._steps.cache)
                self._speculation.begin(sequence)
        except Exception as error:
            if not isinstance(error, RequestError):
                _log.exception("rejecting a request: unexpected error")
            self._finish(job, Failure(str(error), INVALID))
        else:
            self._waiting.append(job.sequences)
            self.note_load()

    def note_load(self) -> None:
        """Pass what is in the batch, in the queue and in the cache to the metrics."""
        if self._steps.places:
            self.metrics.note_adapters(self._batch, self._waiting)
        self.metrics.note_load(len(self._batch), len(self._waiting), self._steps.cache.allocator)

    @torch.inference_mode()
    def step(self) -> None:
        """Take one step: each sequence in the batch gets its next token."""
        self._times.begin(is_idle=all(each.is_there for each in self._batch.pending))
        # 1) Free what is no longer wanted, and admit what fits.
        for job in jobs_of([*self._batch, *self._waiting]):
            if is_cancelled(job):
                self._finish(job, Failure("cancelled", CANCELLED))
        for job, problem in self._limits.find_late(self._waiting.jobs):
            self._finish(job, Failure(problem, UNAVAILABLE))
        self._waiting.order_arrivals()
        self._make_way()
        part, tokens = self._waiting.next_chunk()
        new = [] if part else self._waiting.admit()
        tokens = tokens or sum(sequence.source_length + len(sequence.inputs()) - sequence.skipped for sequence in new)
        rows_of_step: Iterable[Sequence] = part or new
        try:
            # 2) Prefill the contexts of new sequences, or a chunk of one that waits.
            for sequence in part:
                self._batch.run_chunk(sequence, tokens)
            hidden = self._batch.prefill(new) if new else None
            rows_of_step = self._batch
            drafts = {} if new or self._batch.is_mixed else self._choose_drafts()
            # 3) Launch the next token of every sequence.
            depth = 0
            if any(sequence.needs_step for sequence in self._batch):
                is_first = not self._batch.pending
                if drafts:
                    self._batch.verify(drafts)
                else:
                    self._batch.launch(hidden)
                drafted = sum(map(len, drafts.values()))
                self._times.launch(len(self._batch) - len(new), tokens + drafted, is_first)
                is_ahead = self._steps_ahead and not drafts
                depth = int(is_ahead and not any(sequence.needs_host for sequence in self._batch))
            # 4) Read the tokens of earlier steps, answer, and free sequences that are done.
            while len(self._batch.pending) > depth:
                self._answer(self._read_tokens())
            self._answer([sequence for sequence in self._batch if sequence.is_done])  # an encoder's, which has no step
            # 5) Take the pages that the next step needs.
            self._take_pages()
        except GroupLostError:
            raise
        except Exception as error:
            _log.exception("a step failed")
            failed = dict.fromkeys([*(self._batch if self._batch.is_mixed else ()), *rows_of_step])
            self._isolate(list(failed), f"generation failed: {error}")
        self.note_load()

    def _choose_drafts(self) -> Drafts:
        """Choose the drafts of the rows that decode, which begin behind all tokens that were launched."""
        batch = self._batch
        if not batch.has_drafting:
            return {}
        found = self._speculation.choose(batch, batch.decoding, not batch.pending)
        if found and batch.pending:
            while batch.pending:
                self._answer(self._read_tokens())
            found = self._speculation.choose(batch, batch.decoding, is_certain=True)
        return found

    def _make_way(self) -> None:
        """Preempt a row of a request that has nearly all of them, where they keep the first row of another out."""
        while sequence := self._waiting.find_in_the_way():
            if self._batch.pending:  # first read all that it has, and free what has ended
                self._answer(self._read_tokens())
            else:
                self._preempt(sequence)
                self._waiting.return_behind_others(sequence)

    def _take_pages(self) -> None:
        """Take the pages that the next token of every sequence needs; if there are too few, preempt the youngest.

        The oldest sequence always has its pages in the end, because alone it fits: see jobs.check_need.
        """
        while not self._batch.grow():
            if self._batch.pending:  # first read all that it has, and free what has ended
                self._answer(self._read_tokens())
            elif self._waiting.drop_begun():
                continue
            elif len(self._batch) > 1:
                sequence = self._batch.youngest
                self._preempt(sequence)
                self._waiting.return_first(sequence)
            elif not self._waiting.evict_session():
                raise EngineError("no page of the KV cache is left for the only sequence")

    def _preempt(self, sequence: Sequence) -> None:
        self._batch.keep([sequence])
        self._batch.free([sequence])
        sequence.preempt()
        self.metrics.preemptions += 1

    def _isolate(self, failed: list[Sequence], problem: str) -> None:
        """Restart sequences of a failed step one by one, to find out which of them fails.

        A sequence that was alone in the step fails its request.
        """
        if self._waiting.begun not in failed:
            self._waiting.drop_begun()
        self._waiting.remove(failed)
        self._batch.forget(failed)
        self._batch.free(failed)
        if len(failed) == 1:
            self._finish(failed[0].job, Failure(problem))
            return
        for sequence in reversed(failed):
            sequence.restart()
            self._waiting.return_first(sequence)
        self._waiting.is_filling = True

    @torch.inference_mode()  # the cache was made in it, and may be written to
    def give_up(self, problem: str, only_begun: bool = False) -> list[Job]:
        """Fail the requests that have been in the batch, or all requests; returns the other ones, in order."""
        jobs = jobs_of([*self._batch, *self._waiting])
        with suppress(GroupLostError):  # no rank is left to take the step with
            begun = self._waiting.begun
            self._batch.free([*self._batch, *([begun] if begun else ())])
        for job in jobs:
            if job.has_begun or not only_begun:
                self._finish(job, Failure(problem))
        self.note_load()
        return self._waiting.jobs()

    def _read_tokens(self) -> list[Sequence]:
        """Wait for the oldest pending tokens and append them; returns the sequences that got one."""
        pending = self._batch.pending.popleft()
        was_awaited = not pending.is_there
        tokens = pending.wait()
        self._times.read(was_awaited)
        self._steps.raise_if_rank_lost()
        present = set(self._batch)  # others were freed since
        found, overflowed = append_tokens(tokens, present)
        if pending.has_drafts:
            moved, spoilt = self._speculation.accept(tokens, {each for each in present if each.job not in overflowed})
            self._batch.settle(moved)
            self._run_again(spoilt)
        self.metrics.note_step(found)
        if overflowed:
            self._steps.raise_if_peer_timed_out()
            self._batch.clear([sequence for sequence in self._batch if sequence.job in overflowed])
        failures = {job: Failure(overflow_in(row)) for job, row in overflowed.items()} | grammar_failures(found)
        for job, failure in failures.items():
            self._finish(job, failure)
        return [each for each in found if each.job not in failures] if failures else found

    def _run_again(self, spoilt: list[Sequence]) -> None:
        """Run the contexts of rows again that have numbers in the cache which are not finite, without drafts."""
        if spoilt:
            self._batch.clear(spoilt)
            self._batch.free(spoilt)
        for sequence in spoilt:
            sequence.preempt()
            sequence.drafting = None
            self._waiting.return_first(sequence)

    def _answer(self, updated: list[Sequence]) -> None:
        """Free sequences that are done; answer requests that are done, or that stream and have new tokens."""
        done = [sequence for sequence in self._batch if sequence.is_done]
        self.metrics.finish(done)
        self._free_and_save(done)
        for job in jobs_of(updated):
            is_done = job.is_done
            if not (is_done or (job.is_streaming and job.has_news and not (job.is_behind and job.is_behind()))):
                continue
            try:
                answer: Answer = answer_so_far(job, is_done)
            except Exception as error:
                _log.exception("building the response failed")
                answer = Failure(f"generation failed: {error}")
            if answer.is_final:
                self._finish(job, answer)
            elif not send(job, answer):
                self._finish(job, None)

    def _finish(self, job: Job, answer: Answer | None) -> None:
        """Free all sequences of a request, and send its last answer, if its client still takes one."""
        code = answer.code if isinstance(answer, Failure) else "" if answer else CANCELLED
        self.metrics.give_up(job, code)
        if (begun := self._waiting.begun) and begun.job is job:
            self._batch.drop(begun)
        decoding = [sequence for sequence in self._batch if sequence.job is job]
        (self._free_and_save if answer and code == CANCELLED else self._batch.free)(decoding)
        self._waiting.remove([sequence for sequence in self._waiting if sequence.job is job])
        self.sessions.finish(job, has_failed=answer is None or code not in ("", CANCELLED, INVALID))
        end_grammars(job)
        note_adapters(job, -1)
        if answer:
            send(job, answer)
        # What is answered is freed at once. Python's search for garbage, which would find it, stops a step for long.
        job.sequences = []

    def _free_and_save(self, sequences: list[Sequence]) -> None:
        """Free slots, and save what sessions continue from."""
        self._batch.keep(sequences)
        for sequence in sequences:
            self.sessions.save(sequence)
        self._batch.free(sequences)
