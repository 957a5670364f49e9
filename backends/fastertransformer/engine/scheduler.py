"""Decide which sequences are in the next step, and take it.

A step is one token for every sequence in the batch. Those that have just come join it with their context's last hidden
state, so they have their first token at the same time as the others their next. Slots of the cache are filled from the
first on: where a sequence leaves, the last one moves in.
"""

from __future__ import annotations

import logging
from collections import deque

import numpy as np
import torch
from torch import Tensor

from . import beam
from .cache import UNBOUNDED
from .contexts import run_contexts
from .errors import GroupLostError, RequestError
from .request import Array
from .sequence import CANCELLED, FAILED, INVALID, Answer, Job, Sequence, output_tensors
from .sessions import Sessions
from .slots import SlotState, traits_of
from .steps import Steps
from .words import ban

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

    Attributes:
        sessions: conversations.
    """

    def __init__(self, steps: Steps, max_rows: int, is_inflight: bool = True, session_idle_s: float = 60.0) -> None:
        self._steps, self._max_rows, self._is_inflight = steps, max_rows, is_inflight
        self._waiting: deque[Sequence] = deque()
        self._chosen: deque[Sequence] = deque()  # of the next batch, where batches are static
        self._batch: list[Sequence] = []
        self._owners: list[tuple[Sequence, int]] = []  # sequence and beam in each slot
        self._ids = np.zeros(0, np.int64)  # of each slot: the token that comes next into the network
        self._positions = np.zeros(0, np.int64)  # of each slot: where it stands
        self._state = SlotState(steps.config.vocab_size, steps.device)
        self._has_windows = False  # whether a slot ever had one
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
            size = (sequence.width, sequence.need, sequence.source_length)
            if (need := cache.shape.bytes_for(*size)) > cache.budget_bytes:
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
        """Give every sequence in the batch its next token."""
        self._drop_cancelled()
        before = len(self._owners)
        hidden = self._prefill(self._admit())
        try:
            if before:
                decoded = self._decode(before)
                hidden = decoded if hidden is None else torch.cat((decoded, hidden))
            if hidden is not None:
                self._advance(hidden)
            self._deliver()
        except GroupLostError:
            raise
        except Exception as error:
            _log.exception("a step of %d sequences failed", len(self._batch))
            jobs = self._jobs(self._batch)
            self._leave(self._batch)
            for job in jobs:
                self._drop(job, Answer(None, f"generation failed: {error}", code=FAILED))

    @torch.inference_mode()  # the cache was made in it, and may be written to
    def give_up(self, problem: str) -> None:
        """Answer everything that waits or is in the batch with a problem."""
        jobs = self._jobs([*self._batch, *self._waiting, *self._chosen])
        self._leave(self._batch)  # all at once leaves no gaps: no step is taken, there may be nobody to take it with
        for job in jobs:
            self._drop(job, Answer(None, problem, code=FAILED))

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
        slots, capacity = sum(each.width for each in everyone), max(each.need for each in everyone)
        cross_capacity = max(each.source_length for each in everyone)
        cache = self._steps.cache
        need_bytes = cache.shape.bytes_for(slots, capacity, cross_capacity) + self.sessions.idle_bytes
        return len(everyone) <= self._max_rows and need_bytes <= cache.budget_bytes

    @staticmethod
    def _is_one_pass(new: list[Sequence]) -> bool:
        if len(new) == 1:
            return True
        tokens = len(new) * max(max(len(each.context.ids), each.source_length) for each in new)
        return tokens <= _PREFILL_TOKENS and not any(each.runs_alone or each.line for each in new)

    def _prefill(self, new: list[Sequence]) -> Tensor | None:
        """Run the contexts of new sequences; give the last hidden state of each of their slots, [n, hidden]."""
        if not new:
            return None
        first = len(self._owners)
        self._batch += new
        self._owners += [(sequence, 0) for sequence in new]  # first beams side by side: they are one pass
        self._owners += [(sequence, beam) for sequence in new for beam in range(1, sequence.width)]
        try:
            self._prepare_slots(first)
            return run_contexts(self._steps, new, first)
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

    def _prepare_slots(self, first: int) -> None:
        """Have room for all owners, those from ``first`` on being new."""
        count = len(self._owners)
        cross_capacity = max(sequence.source_length for sequence in self._batch)
        self._steps.reserve(count, max(sequence.need for sequence in self._batch), cross_capacity, first)
        self._state.reserve(count)
        missing = np.zeros(max(0, count - len(self._ids)), np.int64)
        self._ids, self._positions = (np.concatenate((each, missing)) for each in (self._ids, self._positions))
        for slot in range(first, count):
            sequence, _ = self._owners[slot]
            if not sequence.traits:
                sequence.traits = traits_of(sequence.job.request, sequence.row, self._steps.config.vocab_size)
            self._state.write(slot, sequence.job.request, sequence.row, sequence.traits, sequence.shown)
            self._positions[slot] = sequence.start + len(sequence.context.ids)
        self._settle()
        windows = np.array([sequence.window or UNBOUNDED for sequence, _ in self._owners[first:]])
        self._has_windows |= bool((windows != UNBOUNDED).any())
        if self._has_windows:
            self._steps.set_windows(first, windows)
        for sequence, _ in self._owners[first:]:
            self.sessions.restore(sequence)
        prefixes = np.array([sequence.context.prefix for sequence, beam in self._owners[first:] if not beam])
        if (prefixes >= 0).any():
            self._steps.put_prefixes(first, prefixes)

    # Going on.

    def _decode(self, count: int) -> Tensor:
        """Run the token of each of the first slots; give their hidden states, [count, hidden]."""
        positions = self._positions[:count]
        in_use = [
            min(position + 1, sequence.window or position + 1)
            for position, (sequence, _) in zip(positions.tolist(), self._owners, strict=False)
        ]
        source = max(sequence.source_length for sequence in self._batch)
        hidden = self._steps.decode(self._ids[:count], positions, 0, max(in_use), source)
        self._positions[:count] += 1
        return hidden

    def _advance(self, hidden: Tensor) -> None:
        """Choose the next token of every slot from its hidden state, [N, hidden]."""
        logits = self._steps.logits(hidden)  # [N, V]
        is_lost = ~logits[:, 0].isfinite()  # any column tells: each sums over all hidden numbers
        if any(sequence.bad_words for sequence in self._batch):
            banned = [each.bad_words.completions(each.tail(beam, each.bad_words.reach)) for each, beam in self._owners]
            logits = ban(logits, banned)
        logits = self._state.penalise(logits)
        tokens = self._state.choose(logits)
        if self._state.wanting_log_probs:
            self._note_log_probs(self._state.log_probs(logits, tokens).cpu().numpy())
        for sequence in self._batch:
            if sequence.width > 1 and sequence.limit:
                self._search(sequence, logits, tokens)
        self._state.record(tokens)
        self._ids[: len(self._owners)], lost = torch.stack((tokens, is_lost.long())).cpu().numpy()
        for sequence in self._batch:
            if sequence.width == 1 and sequence.limit:
                sequence.take(0, int(self._ids[sequence.slots[0]]))
            sequence.count += 1
            sequence.is_done = sequence.finish()
        if lost.any():
            self._drop_lost(np.flatnonzero(lost))

    def _drop_lost(self, slots: Array) -> None:
        """Fail the requests whose numbers are infinite or NaN: they would spoil whoever has their slots next."""
        self._steps.wipe(slots)
        for sequence in dict.fromkeys(self._owners[slot][0] for slot in slots.tolist()):
            problem = f"generation failed: the network's numbers overflow in row {sequence.row}"
            hint = "; fp16 reaches 65504, bf16 as far as fp32, and so may prompt embeddings"
            if sequence in self._batch:
                self._drop(sequence.job, Answer(None, problem + hint, code=FAILED))

    def _note_log_probs(self, values: Array) -> None:
        for slot, full, reported in zip(self._state.wanting_log_probs, *values, strict=True):
            sequence, _ = self._owners[slot]
            if sequence.limit:
                sequence.scores[0] += float(full)
                sequence.log_probs[0].append(float(reported))

    def _search(self, sequence: Sequence, logits: Tensor, tokens: Tensor) -> None:
        """Choose a sequence's next beams and write their tokens into [N]."""
        slots = np.array(sequence.slots)
        index = torch.from_numpy(slots).to(logits.device)
        scalars, row = sequence.job.request.scalars, sequence.row
        found = beam.candidates(
            logits[index].log_softmax(-1),
            sequence.scores,
            sequence.has_ended,
            sequence.end_id,
            sequence.beam_length,
            float(scalars["len_penalty"][row]),
            float(scalars["beam_search_diversity_rate"][row]),
        )
        chosen = sequence.branch(found)
        parents = np.array([each.parent for each in chosen])
        if (moved := parents != np.arange(len(slots))).any():
            used = int(self._positions[slots].max())
            self._steps.copy(slots[moved], slots[parents[moved]], min(used, sequence.window or used))
            self._state.copy(slots[moved], slots[parents[moved]])
        tokens[index] = torch.tensor([each.token for each in chosen], device=tokens.device)

    # Leaving.

    def _deliver(self) -> None:
        """Answer what is done or streams, and let those that are done leave."""
        jobs = self._jobs(self._batch)
        self._save([sequence for sequence in self._batch if sequence.is_done])
        self._leave([sequence for sequence in self._batch if sequence.is_done])
        for job in jobs:
            if job.is_done or job.is_streaming:
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
            self.sessions.leave(job, is_lost=answer is None or answer.code not in ("", CANCELLED, INVALID))
        if answer:
            _answer(job, answer)

    def _save(self, sequences: list[Sequence]) -> None:
        """Keep what conversations go on from."""
        for sequence in sequences:
            if sequence.line and not sequence.job.request.ends_session:
                self.sessions.save(sequence, int(self._positions[sequence.slots[0]]))

    def _leave(self, sequences: list[Sequence]) -> None:
        """Free slots, and fill the gaps with the last ones."""
        if not sequences:
            return
        gone = set(sequences)
        self._batch = [sequence for sequence in self._batch if sequence not in gone]
        stays = np.array([sequence not in gone for sequence, _ in self._owners])
        kept = int(stays.sum())
        gaps = np.flatnonzero(~stays[:kept])
        sources = kept + np.flatnonzero(stays[kept:])
        if len(gaps):
            used = int(self._positions[sources].max())
            self._steps.copy(gaps, sources, min(used, self._steps.cache.capacity))
            self._state.copy(gaps, sources)
            self._ids[gaps], self._positions[gaps] = self._ids[sources], self._positions[sources]
            for gap, source in zip(gaps.tolist(), sources.tolist(), strict=True):
                self._owners[gap] = self._owners[source]
        del self._owners[kept:]
        self._settle()

    def _settle(self) -> None:
        """Note who sits where."""
        for sequence in self._batch:
            sequence.slots = [0] * sequence.width
        for slot, (sequence, place) in enumerate(self._owners):
            sequence.slots[place] = slot
        self._state.arrange([sequence.traits for sequence, _ in self._owners if sequence.traits])


def _answer(job: Job, answer: Answer) -> bool:
    """Hand an answer over; false if its taker failed."""
    try:
        job.answer(answer)
    except Exception:
        _log.exception("an answer was not taken")
        return False
    return True
