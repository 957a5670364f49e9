"""An engine under load: requests that come and go at any time, each answer compared with the request's solo run."""

from __future__ import annotations

import os
import queue
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.model.blocks.attention import GroupedWeights
from backends.fastertransformer.engine.model.blocks.feed_forward import DenseWeights
from backends.fastertransformer.engine.ops.linear import padded_rows
from backends.fastertransformer.engine.rows.answer import CANCELLED, Answer, Failure
from backends.fastertransformer.engine.settings import Settings
from support.engines.asking import CPU, Tensors, ask

PAGES = 24
"""The KV cache has room for three rows of the longest requests, or for one of three beams."""
_HEADS, _LONGEST_HEAD, _MOST_OUTPUT = 3, 100, 100
_AT_A_TIME = 24
_MOST_TOKENS = 1024  # of a prefill pass of these requests
_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"runtime_top_k": 7, "repetition_penalty": 1.2},
    {"runtime_top_p": 0.9, "temperature": 1.3},
    {"beam_width": 2},
    {"beam_width": 3},
)


@dataclass(frozen=True)
class Known:
    """A request, and the tokens that each beam of its rows has alone: [row][beam]."""

    tensors: Tensors
    alone: list[list[list[int]]]


class Countdown:
    """Says that a request is cancelled when it was asked for the n-th time, which is once in a step."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def __call__(self) -> bool:
        self._left -= 1
        return self._left < 0


@dataclass
class Asked:
    """A request under way: what is known of it, whether it may end early, and the lengths of its last answer."""

    known: Known
    is_cancelled: Countdown | None
    is_streaming: bool
    lengths: list[list[int]] | None = None


@dataclass
class Outcome:
    """What the load showed.

    Attributes:
        counts: finished requests by their kind.
        problems: wrong answers, in words.
        tokens: of answers that were compared.
        resident_mb: memory of this process, about once a second.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    tokens: int = 0
    resident_mb: list[float] = field(default_factory=list)

    @property
    def growth_mb(self) -> float:
        """Give by how much the memory grew from the second quarter of the time to the last one."""
        quarter = max(1, len(self.resident_mb) // 4)
        early, late = self.resident_mb[quarter : 2 * quarter] or self.resident_mb, self.resident_mb[-quarter:]
        return statistics.median(late) - statistics.median(early)


def make_known(settings: Settings, count: int, seed: int = 0) -> list[Known]:
    """Draw requests, many of which begin alike, and answer each alone, in a large cache that knows no prefixes."""
    draw = random.Random(seed)
    engine = open_engine(replace(settings, has_prefix_cache=False, kv_cache_bytes=0, kv_cache_fraction=0.1), CPU)
    heads = [[draw.randrange(90) for _ in range(_LONGEST_HEAD)] for _ in range(_HEADS)]
    known = []
    for number in range(count):
        rows = [_draw_row(draw, heads) for _ in range(draw.choice((1, 1, 2)))]
        counts = [draw.choice((0, 1, draw.randrange(2, _MOST_OUTPUT), *[_MOST_OUTPUT] * 3)) for _ in rows]
        ends = draw.choice(({"end_id": 4000}, {"end_id": 17}))
        tensors = ask(rows, counts, random_seed=number, **_KINDS[number % len(_KINDS)], **ends)
        known.append(Known(tensors, tokens_of(engine.generate([engine.parse(tensors)])[0])))
    engine.close()
    return known


def _draw_row(draw: random.Random, heads: list[list[int]]) -> list[int]:
    head = draw.choice(heads)[: draw.choice((0, draw.randrange(_LONGEST_HEAD), _LONGEST_HEAD))]
    return [*head, *(draw.randrange(90) for _ in range(draw.randrange(1, 20)))]


def tokens_of(outputs: Tensors) -> list[list[list[int]]]:
    """Give the tokens of each row and beam, input included."""
    ids, lengths = outputs["output_ids"], outputs["sequence_length"]
    return [
        [beam[:length].tolist() for beam, length in zip(row, ends, strict=True)]
        for row, ends in zip(ids, lengths, strict=True)
    ]


class Load:
    """Requests to one engine, whose cache has ``PAGES`` pages.

    Args:
        settings: of the model.
        known: the requests.
        seed: of what comes when.
    """

    def __init__(self, settings: Settings, known: list[Known], seed: int = 1) -> None:
        token_bytes = _token_bytes(settings)
        self.engine: Engine = open_engine(replace(settings, kv_cache_bytes=(PAGES + 1) * 32 * token_bytes), CPU)
        assert self.engine._steps.cache.allocator.count == PAGES
        self._known, self._draw, self.outcome = known, random.Random(seed), Outcome()
        self._answers: queue.SimpleQueue[tuple[Asked, Answer]] = queue.SimpleQueue()
        self._open = 0

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Let oneDNN compile its code for each number of rows and form of matrix; it keeps about 0.4 MB for each."""
        torch.set_num_threads(1)  # as the engine's thread has it; other code is made for more
        network = self.engine._steps.network
        assert network.weights.decoder and network.weights.head
        first = network.weights.decoder.layers[0]
        own, dense = first.attention, first.feed_forward
        assert isinstance(own, GroupedWeights) and isinstance(dense, DenseWeights)
        matrices = (own.qkv, own.out, dense.into, dense.gate, dense.out, network.weights.head)
        hidden, heads = network.config.hidden_units, network.config.head_num * network.config.size_per_head
        widths = (hidden, heads, hidden, hidden, network.config.inter_size, hidden)
        sizes = sorted({padded_rows(rows) for rows in range(1, _MOST_TOKENS + 1)})
        for matrix, width in zip(matrices, widths, strict=True):
            if matrix:
                for rows in sizes:
                    matrix(torch.zeros(rows, width))

    def run(self, duration_s: float, has_seen_enough: Callable[[], bool]) -> Outcome:
        """Send requests for a while, and for as long as too little has happened; wait for all; compare each answer."""
        start = time.monotonic()
        while (is_sending := self._elapsed(start) < duration_s or not has_seen_enough()) or self._open:
            wanted = self._draw.randrange(_AT_A_TIME + 1) if is_sending else 0
            while self._open < wanted:
                self._submit()
            if self._open:
                self._receive(*self._answers.get(timeout=120))
        return self.outcome

    def _elapsed(self, start: float) -> float:
        """Give the seconds since the start, and note the memory once in each."""
        elapsed = time.monotonic() - start
        if elapsed >= len(self.outcome.resident_mb):
            self.outcome.resident_mb.append(_resident_mb())
        return elapsed

    def _submit(self) -> None:
        steps = self._draw.choice((None, None, None, 0, self._draw.randrange(1, 30), self._draw.randrange(30, 120)))
        is_cancelled = None if steps is None else Countdown(steps)
        asked = Asked(self._draw.choice(self._known), is_cancelled, self._draw.random() < 0.4)
        request = self.engine.parse(asked.known.tensors)
        self._open += 1

        def answer(found: Answer) -> None:
            self._answers.put((asked, found))

        self.engine.submit(request, answer, asked.is_streaming, is_cancelled)

    def _receive(self, asked: Asked, answer: Answer) -> None:
        self._open -= answer.is_final
        if isinstance(answer, Failure):
            if answer.code != CANCELLED or not asked.is_cancelled:
                self.outcome.problems.append(f"{answer.code}: {answer.problem}")
            self.outcome.counts["cancelled"] += 1
            return
        if problem := _difference(asked, answer):
            self.outcome.problems.append(problem)
        self.outcome.counts["parts of a stream" if not answer.is_final else "answered"] += 1
        if answer.is_final:
            self.outcome.tokens += int(answer.tensors["sequence_length"].sum())

    def check_pages(self) -> None:
        """Assert that every page is free exactly once: in the pool, or known by its tokens and used by no row."""
        while not self.engine._scheduler.is_idle:
            time.sleep(0.01)
        allocator = self.engine._steps.cache.allocator
        assert allocator.free == allocator.count == PAGES
        free = [page for run in allocator._pool._runs for page in run]
        assert sorted([*free, *allocator.prefixes._unused]) == list(range(1, PAGES + 1))
        assert {each.uses for each in allocator.prefixes._known.values()} <= {0}


def _difference(asked: Asked, answer: Answer) -> str:
    """Say how an answer differs from what it must be: the solo run's, or of a stream the beginning of that."""
    assert not isinstance(answer, Failure)
    found = tokens_of(answer.tensors)
    lengths = [[len(beam) for beam in row] for row in found]
    is_beam_search = len(found[0]) > 1
    expected = asked.known.alone
    if not answer.is_final:
        if is_beam_search:  # the best beams may become others
            return ""
        expected = [
            [beam[: len(part)] for beam, part in zip(*rows, strict=True)] for rows in zip(expected, found, strict=True)
        ]
    if asked.lengths is not None and not is_beam_search and np.any(np.array(lengths) < np.array(asked.lengths)):
        return f"a stream went back from {asked.lengths} to {lengths} tokens"
    asked.lengths = lengths
    return "" if found == expected else f"{found} instead of {expected}"


def _token_bytes(settings: Settings) -> int:
    engine = open_engine(settings, CPU)
    token_bytes = engine._steps.cache.shape.token_bytes
    engine.close()
    return token_bytes


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
