"""CUDA graphs: one launch in place of some hundreds, for decode steps of certain row counts, and inputs of tokens.

Inputs that begin rows, inputs that continue what is cached (prefix cache, sessions, chunks of a prompt), and mixed
steps have graphs of their own. A mixed step is a decode step and such an input in one pass. Where layers keep states,
rows with drafts have two graphs: one runs them, and one lets the states go on by the tokens that were right.

A graph reads everything that differs from one replay to the next (ids, positions, windows, pages) from device memory,
at addresses that never change, so it is captured once, when the model is loaded. A step of fewer rows than were
captured is padded with free slots, which write to page 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..arrays import MOST_SLOTS, upload
from ..cache.kv_cache import KvCache
from ..model.network import Network
from ..ops.adapted_rows import AdaptedRows
from ..ops.drafted_states import DraftedStates
from ..ops.packed_rows import NumberedRows, Rows

Chosen = tuple[Tensor, Tensor]  # logits, fp32 [N, V], and the argmax tokens, see logits.argmax
ROWS: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, *range(48, 257, 16))
# Few enough to be captured in seconds, and close enough that beyond 64 tokens padding is less than a third. For 448,
# 576 and 832 tokens cuBLAS is slower than for the next size: a Llama 8B's products take 14.7 ms for 448, 10.3 for 512
# (H100, bf16, torch 2.11).
_SMALL_TOKENS = (*range(16, 128, 16), *range(128, 256, 32), 256, 320, 384, 512, 640, 704, 768, 896, 960)
TOKENS = (*_SMALL_TOKENS, *range(1024, 2048, 128), *range(2048, 4097, 256))
CONTINUED_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # of inputs that continue rows
MIXED_TOKENS = (64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 640, 768, 896, 1024, 1152)  # of mixed steps
_MIXED_CONTEXTS = 8  # prompts, or parts of them, in a mixed step, at most
T = TypeVar("T")
_log = logging.getLogger(__name__)


def most_rows(tokens: int) -> int:
    """Return the most rows that a graph of inputs of ``tokens`` tokens has room for.

    Each row costs a block of queries that may be empty (see PackedRows.cut); with an eighth of the tokens such blocks
    are few.
    """
    return max(16, min(64, tokens // 8))


def mixed_rows(tokens: int) -> int:
    """Return the most rows that decode in a mixed step of ``tokens`` tokens."""
    return min(ROWS[-1], tokens - tokens // 4)


class Graphs(Generic[T]):
    """CUDA graphs by size.

    Args:
        run: computes a size; each replay writes its result to the same memory.
        pool: memory that several graphs share, so that a result is valid until the next replay of any of them.
    """

    def __init__(self, run: Callable[[int], T], pool: Any) -> None:
        self._run, self._pool = run, pool
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, T]] = {}

    def capture(self, size: int) -> None:
        """Run a size, which compiles its kernels, and capture it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._run(size)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            result = self._run(size)
        self._graphs[size] = graph, result

    def replay(self, size: int) -> T:
        """Replay the graph of a size."""
        graph, result = self._graphs[size]
        graph.replay()
        return result

    @property
    def sizes(self) -> Iterable[int]:
        """The captured sizes."""
        return self._graphs

    def size_of(self, count: int, has_room: Callable[[int], bool] = lambda _: True) -> int:
        """Return the smallest captured size of at least ``count`` that meets a condition; 0: there is none."""
        return min((size for size in self._graphs if size >= count and has_room(size)), default=0)

    def release(self) -> None:
        """Destroy all graphs, at once: no garbage collection is needed, which would leave frozen objects alone."""
        self._graphs.clear()


class StepGraphs:
    """The CUDA graphs of a process: decode steps, which ``decode`` runs for a number of rows, and inputs.

    Attributes:
        largest_input: tokens of the largest captured input of new rows; 0: none is captured.
        largest_step: rows of the largest captured decode step; 0: none is captured.
        largest_mixed: tokens of the largest captured mixed step; 0: none is captured.
    """

    def __init__(
        self, network: Network, cache: KvCache, decode: Callable[[int, Tensor | None, AdaptedRows | None], Chosen]
    ) -> None:
        self._network, self._cache, self._run_decode = network, cache, decode
        self._adapters: Tensor | None = None  # of each slot; see of_adapted
        self._places = 0
        self._pool, head = torch.cuda.graph_pool_handle(), network.weights.head
        # A step decodes at most once, so all graphs write their logits to the same memory: with a vocabulary of 256,000
        # those of all sizes would take 6 GB.
        self._device = cache.page_tables.device
        most_logits = ROWS[-1] + _MIXED_CONTEXTS
        self._logits = torch.empty(most_logits, len(head.weight), device=self._device) if head else None
        self._last = torch.zeros(_MIXED_CONTEXTS, dtype=torch.long, device=self._device)  # tokens of a mixed step
        self._begin_graphs()
        # Id, position and slot of padding; slot MOST_SLOTS is never allocated.
        self._padding = np.array([[0], [0], [MOST_SLOTS]])
        self._tokens = upload(np.repeat(self._padding, TOKENS[-1], 1), self._device)
        most = max(most_rows(TOKENS[-1]), ROWS[-1] + _MIXED_CONTEXTS)
        self._ends = torch.zeros(most + 2, dtype=torch.int32, device=self._device)
        self._counts = torch.zeros(most + 1, dtype=torch.int32, device=self._device)  # of right tokens, by row
        self._last_input: tuple[Any, int] = None, 0  # which graphs, and size
        self._warned: set[str] = set()  # kinds of steps that ran without a CUDA graph

    def _begin_graphs(self) -> None:
        decode = self._run_decode
        self._decode = Graphs(
            lambda rows: decode(rows, self._logits_of(rows), self._adapted(slice(0, rows))), self._pool
        )
        self._begin = Graphs(self._run_contexts, self._pool)
        self._continue, self._mix = Graphs(self._continue_contexts, self._pool), Graphs(self._run_mixed, self._pool)
        self._draft, self._settle = Graphs(self._run_drafts, self._pool), Graphs(self._settle_drafts, self._pool)
        self._drafted: DraftedStates | None = None  # of the drafts that have run last
        self.largest_input, self.largest_step, self.largest_mixed = 0, 0, 0

    def of_adapted(self, adapters: Tensor, places: int) -> StepGraphs:
        """Return graphs of calls some of whose rows have adapters; they share this one's memory.

        Args:
            adapters: int64, place of each slot's adapter; ``places``: it has none.
            places: how many there are.
        """
        found = copy(self)
        found._adapters, found._places = adapters, places
        found._begin_graphs()
        return found

    def _adapted(self, slots: Tensor | slice) -> AdaptedRows | None:
        if self._adapters is None:
            return None
        return self._network.ops.adapted_rows(self._adapters[slots], self._places)

    def capture(self, rows: int, tokens: int, continued: int, mixed: int) -> None:
        """Capture a decode step of some rows, inputs of some tokens, inputs that continue rows, or a mixed step."""
        if mixed:
            self._mix.capture(mixed)
        else:
            (self._decode if rows else self._begin if tokens else self._continue).capture(rows or tokens or continued)
        if self._cache.states and 0 < continued <= MOST_SLOTS:
            self._draft.capture(continued)
            self._draft.replay(continued)  # leaves what settling reads, in memory that other graphs may overwrite
            self._settle.capture(continued)
        self.largest_step, self.largest_input = max(self.largest_step, rows), max(self.largest_input, tokens)
        self.largest_mixed = max(self.largest_mixed, mixed)

    def release(self) -> None:
        """Destroy all graphs; no step follows."""
        self._drafted = None
        for graphs in (self._decode, self._begin, self._continue, self._mix, self._draft, self._settle):
            graphs.release()

    def rows_of_step(self, count: int) -> int:
        """Return the rows of the graph that runs a decode step, padding included; 0: no graph is large enough."""
        return self._decode.size_of(count)

    def decode(self, count: int) -> Chosen | None:
        """Run a decode step; None: no graph is large enough."""
        if not (size := self.rows_of_step(count)):
            self._warn_uncaptured("decode step", f"{count} rows", f"steps of up to {self.largest_step} rows")
            return None
        logits, tokens = self._decode.replay(size)
        return logits[:count], tokens[:count]

    def begin(self, rows: NumberedRows) -> Tensor | None:
        """Run new rows, or encoder inputs; None: no graph has room for them. See Steps.extend."""
        hidden = self._run_input(self._begin, rows)
        if hidden is None:
            most = self.largest_input
            limit = f"inputs of up to {most} tokens and {most_rows(most)} rows" if most else "no inputs"
            self._warn_uncaptured("input", f"{rows.tokens.shape[1]} tokens in {len(rows.lengths)} rows", limit)
        return hidden

    def extend(self, rows: NumberedRows) -> Tensor | None:
        """Run rows of which some continue what is cached, and none has a window; None: no graph has room for them."""
        return self._run_input(self._continue, rows)

    def has_drafts(self, rows: int, tokens: int) -> bool:
        """Return whether there is a graph of some rows that run drafts, of some tokens together."""
        graphs = self._draft if self._cache.states else self._continue
        return graphs.size_of(tokens, lambda size: most_rows(size) >= rows) > 0

    def draft(self, rows: NumberedRows) -> Tensor | None:
        """Run rows whose layers keep states, and drafts; no graph may run until settle; see extend."""
        return self._run_input(self._draft, rows)

    def settle(self, counts: Tensor) -> None:
        """Settle what draft has run; see DraftedStates."""
        graphs, size = self._last_input
        assert graphs is self._draft, "the last input that a graph has run were drafts"
        self._counts.zero_()
        self._counts[: len(counts)] = counts
        self._settle.replay(size)

    def size_of_mixed(self, rows: int, tokens: int, contexts: int) -> int:
        """Find the size of a step in which some rows decode, and contexts have some tokens together; 0: none has room.

        Args:
            rows: that decode.
            tokens: of the contexts.
            contexts: how many there are.
        """
        has_room = contexts <= _MIXED_CONTEXTS
        return self._mix.size_of(rows + tokens, lambda size: has_room and mixed_rows(size) >= rows)

    def mixed_room(self, rows: int) -> int:
        """Return how many tokens contexts may have in the largest step in which some rows decode; 0: none has room."""
        return max((size - rows for size in self._mix.sizes if mixed_rows(size) >= rows), default=0)

    def mix(
        self, rows: NumberedRows, ids: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        """Run a mixed step, whose first rows decode: their ids and positions are given on the device, [N] each.

        Returns:
            Hidden states of all tokens; and, if this process predicts, logits of the first N, and those of the last
            token of each other row. None: no graph has room.
        """
        count = rows.tokens.shape[1]
        if not (size := self.size_of_mixed(len(ids), count - len(ids), len(rows.lengths) - len(ids))):
            return None
        self._upload(rows, size)
        self._tokens[0, : len(ids)], self._tokens[1, : len(ids)] = ids, positions
        contexts, first = len(rows.lengths) - len(ids), mixed_rows(size)
        self._last[:contexts] = upload(rows.ends[len(ids) + 1 :] - 1, self._device)
        hidden, logits = self._mix.replay(size)
        if logits is None:
            return hidden[:count], None, None
        return hidden[:count], logits[: len(ids)], logits[first : first + contexts]

    def _run_input(self, graphs: Graphs[Tensor], rows: NumberedRows) -> Tensor | None:
        count, row_count = rows.tokens.shape[1], len(rows.lengths)
        if not (size := graphs.size_of(count, lambda size: most_rows(size) >= row_count)):
            return None
        self._upload(rows, size)
        self._last_input = graphs, size
        return graphs.replay(size)[:count]

    def _upload(self, rows: NumberedRows, size: int) -> None:
        """Copy rows to where the graphs of a size read them, with padding after them."""
        count = rows.tokens.shape[1]
        padded = np.concatenate((rows.tokens, np.repeat(self._padding, size - count, 1)), 1)
        self._tokens[:, :size] = upload(padded, self._device)
        # The padding is one more row, and the rows after it have no tokens.
        ends = np.concatenate((rows.ends, np.full(len(self._ends) - len(rows.ends), size)))
        self._ends.copy_(upload(ends.astype(np.int32), self._device))

    def _warn_uncaptured(self, kind: str, size: str, limit: str) -> None:
        """Warn, once for each kind of step, that no CUDA graph covers this size."""
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning(
                "%s of %s runs without a CUDA graph, which is slower: graphs were captured of %s", kind, size, limit
            )

    def _run_contexts(self, size: int) -> Tensor:
        rows = self._rows_of(size)
        if self._cache.shape.has_cross:
            return self._network.encode(rows, self._cache)
        return self._network.extend(rows, self._cache, adapted=self._adapted(rows.slots))

    def _continue_contexts(self, size: int) -> Tensor:
        rows = self._rows_of(size)
        longest = self._cache.most_entries
        return self._network.extend(rows, self._cache, longest=longest, adapted=self._adapted(rows.slots))

    def _run_drafts(self, size: int) -> Tensor:
        rows, states, longest = self._rows_of(size), self._cache.states, self._cache.most_entries
        assert states
        self._drafted = self._network.ops.drafted_states(states.of_slots[rows.row_slots], rows)
        adapted = self._adapted(rows.slots)
        return self._network.extend(rows, self._cache, None, longest, adapted, self._drafted)

    def _settle_drafts(self, size: int) -> None:
        assert self._drafted
        self._drafted.settle(self._counts[: most_rows(size) + 1])

    def _run_mixed(self, size: int) -> tuple[Tensor, Tensor | None]:
        rows = self._rows_of(size, mixed_rows(size) + _MIXED_CONTEXTS)._replace(contexts=_MIXED_CONTEXTS + 1)  # padding
        longest = self._cache.most_entries
        hidden = self._network.extend(rows, self._cache, longest=longest, adapted=self._adapted(rows.slots))
        most = mixed_rows(size)
        logits = self._logits_of(most + _MIXED_CONTEXTS)
        if logits is None:
            return hidden, None
        # Contexts left in self._last of earlier steps may be behind this one's tokens.
        last = self._last.clamp(max=size - 1)
        wanted, slots = (torch.cat((each[:most], each[last])) for each in (hidden, rows.slots))
        return hidden, self._network.logits(wanted, logits, self._adapted(slots))

    def _logits_of(self, rows: int) -> Tensor | None:
        """Memory for the logits of some rows; None: this process does not predict."""
        return None if self._logits is None else self._logits[:rows]

    def _rows_of(self, size: int, most: int = 0) -> Rows:
        ids, positions, slots = self._tokens[:, :size]
        return Rows(ids, positions, slots, self._ends[: (most or most_rows(size)) + 2], None)
