"""What the scheduler counts of requests and steps, as plain numbers; published_metrics.py passes them to Triton.

Each row of a request is counted as a request: it has a prompt of its own, waits, decodes and ends by itself. The names
and bounds are those that dashboards know from vLLM (docs/metrics.md says what each means here).
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several

from ..cache.page_allocator import PageAllocator
from ..rows.answer import CANCELLED, FAILED, UNAVAILABLE
from ..rows.sequence import Job, Sequence

_STOP, _LENGTH, _ABORT, _ERROR = "stop", "length", "abort", "error"
_GIVEN_UP = {CANCELLED: _ABORT, UNAVAILABLE: _ABORT, FAILED: _ERROR}  # by the code of the answer; others: refused
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Values, counted by the first bound that is not below them.

    Attributes:
        bounds: in increasing order; a last one, infinity, is implied.
        counts: of each bound's values, and of those above all bounds.
        total: sum of the values.
        recent: values that were not published yet, one by one; None: they are not kept.
    """

    def __init__(self, bounds: Several[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts, self.total = [0] * (len(self.bounds) + 1), 0.0
        self.recent: deque[float] | None = None

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
        if self.recent is not None:
            self.recent.extend([value] * times)


class EngineMetrics:
    """Counters of one engine since it was opened. The engine's thread writes them; any thread may read them.

    Args:
        longest: tokens of a request, input and output, at most.
        draft_tokens: of a draft at most.
        clock: gives the seconds; that of Job.submitted_s.

    Attributes:
        changed: is set whenever a number may have changed.
        running: rows in the batch.
        waiting: rows in the queue.
        kv_cache_usage: share of the KV cache's pages that is in use, 0 to 1. Pages that only the prefix cache knows are
            free.
        prefix_queries: tokens that were looked for in the prefix cache; see PrefixIndex. Like prefix_hits it begins
            with 0 again when the worker processes were restarted.
        prefix_hits: tokens that were found there.
        preemptions: how often a row was preempted.
        prompt_tokens: of rows that have their first token.
        generation_tokens: with beams, those of every beam.
        finished: rows by what ended them.
        drafts, draft_tokens, accepted_tokens: drafts that were verified, their tokens, and those that were right.
        accepted_by_place: the last by their place in the draft.
        running_adapters, waiting_adapters: names of the LoRA adapters of rows in the batch, and of those in the queue.
    """

    def __init__(self, longest: int = 4096, clock: Callable[[], float] = time.monotonic, draft_tokens: int = 0) -> None:
        self._clock, self._step_s = clock, -1.0
        self.changed = threading.Event()
        self.running = self.waiting = self.prefix_queries = self.prefix_hits = 0
        self.kv_cache_usage = 0.0
        self.running_adapters, self.waiting_adapters = "", ""
        self.preemptions = self.prompt_tokens = self.generation_tokens = 0
        self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self.accepted_by_place = [0] * draft_tokens
        self.finished = dict.fromkeys((_STOP, _LENGTH, _ABORT, _ERROR), 0)
        self.iteration_tokens = Histogram(_STEP_TOKENS)
        self.time_to_first_token, self.inter_token_latency = Histogram(_FIRST_TOKEN_S), Histogram(_TOKEN_S)
        self.time_per_output_token = Histogram(_TOKEN_S)
        self.e2e_latency, self.queue_time = Histogram(_REQUEST_S), Histogram(_REQUEST_S)
        self.prefill_time, self.decode_time = Histogram(_REQUEST_S), Histogram(_REQUEST_S)
        bounds = _one_two_five(longest)
        self.request_prompt_tokens, self.request_generation_tokens = Histogram(bounds), Histogram(bounds)

    def note_load(self, running: int, waiting: int, allocator: PageAllocator) -> None:
        """Note how much the engine has to do, at the end of a step and when a request arrives."""
        self.running, self.waiting = running, waiting
        self.kv_cache_usage = (allocator.count - allocator.free) / allocator.count if allocator.count else 0.0
        self.prefix_queries, self.prefix_hits = allocator.prefixes.queried, allocator.prefixes.found
        if not self.changed.is_set():
            self.changed.set()

    def note_adapters(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Note whose adapters rows in the batch have, and those in the queue."""
        self.running_adapters, self.waiting_adapters = (
            ",".join(sorted({row.adapter.name for row in rows if row.adapter})) for rows in (running, waiting)
        )

    def begin(self, row: Sequence) -> None:
        """Count a row that joins the batch."""
        if row.times.begun_s is None:
            row.times.begun_s = self._clock()

    def note_step(self, rows: Iterable[Sequence]) -> None:
        """Count one step's tokens of rows, of which the host has just read them."""
        now, before = self._clock(), self._step_s
        prompts = tokens = continued = 0
        for row in rows:
            times = row.times
            if row.count <= times.steps:
                continue
            if times.last_s == before:  # had a token in the last step too, like most
                continued += 1
            elif times.last_s is not None:
                self.inter_token_latency.observe(now - times.last_s)
            else:
                prompts += self._note_first(row, now)
            tokens += row.width * (row.count - max(0, times.steps)) if row.max_tokens else 0
            times.last_s, times.steps = now, row.count
        if continued:
            self.inter_token_latency.observe(now - before, continued)
        if prompts or tokens:
            self.iteration_tokens.observe(prompts + tokens)
        self.prompt_tokens += prompts
        self.generation_tokens += tokens
        self._step_s = now

    def note_draft(self, drafted: int, accepted: int) -> None:
        """Count a draft that was verified, and how many of its first tokens were right."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        for place in range(accepted):
            self.accepted_by_place[place] += 1

    def _note_first(self, row: Sequence, now: float) -> int:
        """Count a row whose context was run; returns its prompt's tokens."""
        row.times.first_s = now
        if row.max_tokens:
            self.time_to_first_token.observe(now - row.job.submitted_s)
        return row.prompt_tokens

    def finish(self, rows: Several[Sequence]) -> None:
        """Count rows that have all that they asked for."""
        if not rows:
            return
        if without_step := [row for row in rows if row.times.first_s is None]:  # an encoder's
            self.note_step(without_step)
        now = self._clock()
        for row in rows:
            times, submitted = row.times, row.job.submitted_s
            begun, first, last = times.begun_s or now, times.first_s or now, times.last_s or now
            tokens = row.count * row.width if row.max_tokens else 0
            self.finished[_STOP if row.beams[0].has_ended else _LENGTH] += 1
            self.e2e_latency.observe(now - submitted)
            self.queue_time.observe(begun - submitted)
            self.prefill_time.observe(first - begun)
            self.decode_time.observe(last - first)
            if row.count > 1:
                self.time_per_output_token.observe((last - first) / (row.count - 1))
            self.request_prompt_tokens.observe(row.prompt_tokens)
            self.request_generation_tokens.observe(tokens)

    def give_up(self, job: Job, code: str) -> None:
        """Count the rows of a request, answered with this code, that end before they have what they asked for."""
        if reason := _GIVEN_UP.get(code):
            self.finished[reason] += sum(not row.is_done for row in job.sequences)


def _one_two_five(longest: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, ... up to ``longest``."""
    powers = (10**exponent for exponent in range(len(str(longest))))
    return [digit * power for power in powers for digit in (1, 2, 5) if digit * power <= longest]
