"""The sequences that wait, which of them are in the next step, and how many may wait, and for how long."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import takewhile

from ..cache.page_allocator import PageAllocator
from ..rows.sequence import Job, Sequence, State
from ..steps.steps import Steps
from .batch import Batch
from .chunks import Chunks
from .metrics import EngineMetrics
from .prefill_pass import PrefillPass, most_tokens
from .sessions import Sessions
from .step_room import measure_room
from .turns import Turns

_PART_FOR_OTHERS = 8  # of the rows
_FIRST_PART = 4  # of a pass, which the first rows of a request may fill before it is another one's turn


class WaitingQueue:
    """Sequences in the order in which they join the batch; the first one that does not fit stops the others.

    It is the order of their turns, see turns.py, and of those that arrive during one step see ``order_arrivals``.

    Args:
        steps: the network and its cache.
        batch: what they join.
        sessions: some are evicted where they alone are in the way.
        metrics: count what begins.
        max_rows: sequences in the batch at most.
        is_inflight: see Scheduler.
        chunk_tokens: see Chunks.

    Attributes:
        is_filling: whether the batch takes more.
    """

    def __init__(
        self,
        steps: Steps,
        batch: Batch,
        *,
        sessions: Sessions,
        metrics: EngineMetrics,
        max_rows: int,
        is_inflight: bool,
        chunk_tokens: int,
    ) -> None:
        self._steps, self._batch, self._sessions, self._metrics = steps, batch, sessions, metrics
        self._allocator = steps.cache.allocator
        self._most_tokens = most_tokens(steps.device)
        self._turns = Turns(self._most_tokens // _FIRST_PART)
        self._max_rows, self._is_inflight = max_rows, is_inflight
        self._chunks, self._sequences = Chunks(steps, chunk_tokens), deque[Sequence]()
        self._arrived: list[Sequence] = []  # since the last step; these are the last ones of all
        self.is_filling = True

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def jobs(self) -> list[Job]:
        """Return the requests of which sequences wait."""
        return jobs_of(self._sequences)

    def append(self, sequences: Iterable[Sequence]) -> None:
        """Add new sequences behind the others."""
        added = list(sequences)
        self._sequences.extend(added)
        self._arrived += added

    def order_arrivals(self) -> None:
        """Set when the sequences are due that arrived since the last step, and put all in this order.

        If all are answered whole, first are those of the request with the most tokens: a burst ends when its longest
        answer does, and that one ends the sooner the sooner it begins. If some stream, those with the shortest contexts
        are first, which keeps the mean time to a first token the shortest. What a session begins with must come before
        what it goes on with.
        """
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        for _ in arrived:
            self._sequences.pop()
        if not any(each.session_row for each in arrived):
            is_streaming = any(each.job.is_streaming for each in arrived)
            arrived.sort(key=lambda each: each.job.context_tokens if is_streaming else -each.job.request.max_tokens)
        self._turns.assign(arrived)
        self._sequences = deque(sorted([*self._sequences, *arrived], key=lambda each: each.due))

    def return_first(self, sequence: Sequence) -> None:
        """Add a sequence that has been in the batch before all others."""
        self._sequences.appendleft(sequence)

    def return_behind_others(self, sequence: Sequence) -> None:
        """Add a sequence that has made way behind those of requests that have no row in the batch."""
        self._sequences.insert(len(self._of_others()), sequence)

    def find_in_the_way(self) -> Sequence | None:
        """Find the youngest row of a request that keeps the first row of another out; None: there is none.

        A request may have all rows while it is alone. An eighth of them is for others when they come.
        """
        if not (self._sequences and self._is_inflight) or self._sequences[0].is_isolated:
            return None
        free, part = self._max_rows - len(self._batch), max(1, self._max_rows // _PART_FOR_OTHERS)
        if free >= min(part, len(self._sequences)):
            return None
        (largest, rows), *_ = Counter(sequence.job.client for sequence in self._batch).most_common(1)
        coming = {sequence.job.client for sequence in self._of_others()}
        if len(coming) <= free or rows <= max(1, self._max_rows - part):
            return None
        return [sequence for sequence in self._batch if sequence.job.client == largest][-1]

    def _of_others(self) -> list[Sequence]:
        """List the first that wait, as far as their requests have no row in the batch."""
        clients = {sequence.job.client for sequence in self._batch}
        return list(takewhile(lambda each: each.job.client not in clients, self._sequences))

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Remove those of the sequences that wait."""
        removed = set(sequences)
        self._sequences = deque(sequence for sequence in self._sequences if sequence not in removed)
        self._arrived = [sequence for sequence in self._arrived if sequence not in removed]

    def evict_session(self) -> bool:
        """Free what is saved of a session: of the one idle longest, else of those whose requests wait."""
        return self._sessions.evict_oldest() or self._sessions.evict_busy(jobs_of([*self._batch, *self._sequences]))

    @property
    def begun(self) -> Sequence | None:
        """The sequence whose context was run in part; it is the first that waits. None: there is none."""
        first = self._sequences[0] if self._sequences else None
        return first if first and first.state is State.PREFILLING else None

    def drop_begun(self) -> bool:
        """Free the pages of the sequence whose context was run in part; false: there is none."""
        if begun := self.begun:
            self._batch.drop(begun)
        return begun is not None

    def next_chunk(self) -> tuple[list[Sequence], int]:
        """Take the pages of the next chunk: its sequence, if there is one, and its tokens."""
        self.is_filling |= self._is_inflight or not self._batch
        if not (self.is_filling and self._sequences):
            return [], 0
        sequence, allocator, decoding = self._sequences[0], self._allocator, self._batch.decoding
        room = measure_room(self._steps, decoding, self._sequences, self._most_tokens).captured
        if not (tokens := self._chunks.choose_tokens(sequence, decoding, len(self._sequences), room)):
            return [], 0
        reservation = sequence.reservation
        if sequence.state is State.PREFILLING:
            missing = reservation.pages_of_chunk(tokens)
            fits = not missing or missing + self._batch.pages_to_grow <= allocator.free
        else:
            fits = self._measure_room().fits(sequence) and reservation.pages_of_chunk(tokens) <= allocator.free
        if not fits:
            return [], 0
        sequence.begin_prefill(tokens)
        self._metrics.begin(sequence)
        return [sequence], tokens

    def admit(self) -> list[Sequence]:
        """Take waiting sequences that fit into the batch, in order, up to one prefill pass."""
        decoding = self._batch.decoding
        room = measure_room(self._steps, decoding, self._sequences, self._most_tokens)
        prefill = PrefillPass(decoding, room.most)
        self._fill(prefill, decoding, room.captured)
        if prefill.sequences:
            self._turns.advance(prefill.sequences, self._sequences)
        return prefill.sequences

    def _fill(self, prefill: PrefillPass, decoding: int, most: int) -> None:
        room = self._measure_room()
        while self.is_filling and self._sequences:
            sequence, taken = self._sequences[0], prefill.sequences
            if not room.fits(sequence):
                # Where no other sequence is in the way, sessions are; and a whole context may take fewer pages than the
                # rest of one, see Reservation.
                if self._batch or taken or not (self.evict_session() or self.drop_begun()):
                    break
            elif prefill.takes(sequence) and not self._chunks.choose_tokens(
                sequence, decoding, len(taken) + len(self._sequences), most
            ):
                self._sequences.popleft()
                sequence.begin_prefill()
                room.take(sequence)
                prefill.add(sequence)
                self._metrics.begin(sequence)
            else:
                return
        self.is_filling = self._is_inflight

    def _measure_room(self) -> _Room:
        return _Room(self._batch, self._max_rows, self._allocator)


@dataclass(frozen=True)
class QueueLimits:
    """The limits of the queue. Others are refused, so that their clients can go elsewhere.

    A request that has been in the batch is not subject to them.

    Attributes:
        requests: that wait at most; 0: any number.
        wait_s: seconds that a request waits at most; 0: any time.
        clock: gives the seconds.
    """

    requests: int = 0
    wait_s: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def problem_at_arrival(self, job: Job, waiting: Callable[[], Several[Job]]) -> str:
        """Return why a request is refused, given those that wait; empty: it may wait too, from now on."""
        if job.arrived_s is None:
            if self.requests and (queued := sum(not each.has_begun for each in waiting())) >= self.requests:
                return (
                    f"{queued} requests wait already, and max_queue_length is {self.requests}: send it again later, or"
                    " to another server"
                )
            job.arrived_s = self.clock()
        return ""

    def find_late(self, waiting: Callable[[], Several[Job]]) -> Iterator[tuple[Job, str]]:
        """Find the requests that have waited for too long, each with what its client is told."""
        if not self.wait_s:
            return
        now = self.clock()
        for job in waiting():
            if not job.has_begun and job.arrived_s is not None and now - job.arrived_s > self.wait_s:
                waited = f"it has waited for {now - job.arrived_s:.3g} s, and max_queue_s is {self.wait_s:g}"
                yield job, f"{waited}: send it again later, or to another server"


NO_LIMITS = QueueLimits()


class _Room:
    """What the batch has left for sequences that join it.

    Args:
        batch: before they join.
        max_rows: sequences in it at most.
        allocator: the cache's pages.
    """

    def __init__(self, batch: Batch, max_rows: int, allocator: PageAllocator) -> None:
        self._max_rows, self._allocator = max_rows, allocator
        self._rows, self._slots = len(batch), sum(sequence.width for sequence in batch)
        self._is_held = any(sequence.is_isolated for sequence in batch)
        # The others are left a page for each row, so that those that join last are not preempted at once.
        self._spare_pages = batch.pages_to_grow

    def fits(self, sequence: Sequence) -> bool:
        """Return whether one more sequence fits."""
        if self._rows and (self._is_held or sequence.is_isolated):
            return False
        if sequence.adapter and sequence.state is State.WAITING and not sequence.adapter.fits:
            return False
        has_slots = self._rows < self._max_rows and self._slots + sequence.width <= self._allocator.most_rows
        return has_slots and sequence.reservation.pages_to_begin + self._spare_pages <= self._allocator.free

    def take(self, sequence: Sequence) -> None:
        """Count a sequence that fits, and has its pages."""
        self._rows, self._slots = self._rows + 1, self._slots + sequence.width
        self._is_held |= sequence.is_isolated
        self._spare_pages += sequence.reservation.pages_to_grow


def jobs_of(sequences: Iterable[Sequence]) -> list[Job]:
    """Return the requests of sequences, each one once, in order."""
    return list(dict.fromkeys(sequence.job for sequence in sequences))
